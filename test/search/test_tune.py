"""Tests of the search for tiles: how it ranks tiles, that the tables contain the tiles that it finds, and bench.py with TUNE=1 and a stand-in for the
clock."""
from __future__ import annotations
import json, os, subprocess, sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from click.testing import CliRunner
from tinygrad import Context
import bench
from attn import tune
from attn.chips import FAMILIES, Chip, get_chip
from attn.cache import tuned
from attn.choose import tiled_tiles
from attn.search import backward as backward_search, forward as search
from attn.choose.backward_tiles import amd_backward_tile
from attn.chips.shapes import EVERY, BackwardShape, ForwardShape, UpTo
from attn.choose.dispatch import choose, choose_tile
from attn.search.forward import Bound, RankedTile, best
from attn.search.plain import tiled_backward_space, tiled_space
from attn.choose.tiled_tiles import tiled_backward_tile, tiled_tile
from attn.choose.rows import rows_for
from attn.choose.tiles import amd_tile
from attn.isa.source import Spec, problem_of_spec
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.kernels.tiles.plain import TiledBackwardTile, TiledTile
from attn.measure import tiles_by_time
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from attn.values import FLOATS

ROOT = Path(__file__).resolve().parent.parent.parent
REAL = replace(get_chip("gfx942"), tuned=True)

STAMP = {"attn": "0.1.0", "tinygrad": "0.14.0", "compiler": "clang version 22"}

@pytest.fixture(autouse=True)
def cache(tmp_path:Path, monkeypatch:pytest.MonkeyPatch) -> Path:
  monkeypatch.setattr(tuned, "path", lambda: tmp_path/"attn"/"tune.json")
  monkeypatch.setattr(tuned, "stamp", lambda: STAMP)
  tuned.warn.cache_clear()
  return tmp_path/"attn"/"tune.json"

def problem(**sizes:Any) -> Problem:
  return Problem(**{"B": 2, "H": 16, "Hkv": 16, "Sq": 4096, "Sk": 4096, "D": 128, "Dv": 128} | sizes, softmax_scale=0.1)

# ***** the search *****

FIGURES = {"predicted": 110, "enough": 2, "ahead": 1, "issued": 120, "serial": 136, "waves": 2, "overlap": 200, "small": -128, "short": -64}
def bound(**figures:int) -> Bound: return Bound(**FIGURES | figures)

@pytest.mark.parametrize(("better", "worse"), [
  ({"predicted": 111, "enough": 1}, {"predicted": 110}),
  ({"enough": 2}, {"enough": 1, "issued": 140}), ({"enough": 2, "ahead": 0}, {"enough": 1}), ({"ahead": 1}, {"ahead": 0, "issued": 140}),
  ({"issued": 121}, {"serial": 140}), ({"serial": 137}, {"waves": 3}),
  ({"waves": 3, "overlap": 180}, {"waves": 2}), ({"overlap": 180, "small": -256}, {"overlap": 179}),
  ({"small": -128}, {"small": -256}), ({"short": -32}, {"short": -64})])
def test_ranking(better:dict[str, int], worse:dict[str, int]) -> None:
  assert bound(**better) > bound(**worse)

def test_the_best_is_the_best_of_the_worst() -> None:
  # The search chooses the tile whose slowest variant (a dtype and a mask) is the fastest. Here the tile with the fastest first variant has a slow
  # other variant, and is not chosen. The search does not compile the other variants of a tile if the first is no faster than the slowest variant of
  # the best tile so far.
  tiles = [UpTo(64, ForwardShape(4, 1, n)) for n in (16, 32, 64, 128)]
  ranked = [RankedTile(c, bound(issued=i)) for c, i in zip(tiles, (124, 123, 122, 118))]
  worst, seen = {tiles[0]: bound(issued=100), tiles[1]: None, tiles[2]: bound(issued=120)}, []
  def look(c:UpTo[ForwardShape]) -> Bound|None:
    seen.append(c)
    return worst[c]
  assert best(ranked, look) == RankedTile(tiles[2], bound(issued=120)) and seen == tiles[:3]
  assert best([], look) is None

@pytest.mark.parametrize(("arch", "waves", "registers", "lds", "fit"), [
  ("gfx942", 8, 3, 6.0, 2), ("gfx942", 4, 3, 6.0, 3), ("gfx942", 8, 1, 6.0, 0), ("gfx942", 4, 8, 2.0, 2), ("gfx1100", 8, 6, 4.0, 4),
  ("gfx1100", 4, 5, 16.0, 4)])
def test_waves_come_in_workgroups(arch:str, waves:int, registers:int, lds:float, fit:int) -> None:
  report: Any = SimpleNamespace(resources=SimpleNamespace(waves_by_registers=registers, waves_by_lds=lds))
  tile = replace(amd_tile(problem_of_spec(Spec(arch, 64)), get_chip(arch), UpTo(64, ForwardShape(4, 1, 32))), waves=waves)
  assert search.waves_of(report, tile, get_chip(arch)) == fit

def test_the_space_is_what_fits() -> None:
  wide, narrow = (search.candidates(get_chip(a), 128) for a in ("gfx950", "gfx942"))
  assert set(narrow) < set(wide)                                                           # more LDS
  keys = lambda rows: {row.shape.block_n for row in rows}
  assert keys(wide) == {32, 64, 128} and keys(search.candidates(get_chip("gfx1201"), 64)) == {16, 32, 64, 128}
  assert all(row.shape.q_in_lds for row in search.candidates(get_chip("gfx1100"), 256))               # few registers

@pytest.mark.parametrize(("family", "matrix", "meet"), [("cdna3", 0, False), ("cdna3", 1, True), ("cdna4", 0, False), ("cdna4", 1, True),
                                                        ("rdna3", 0, False), ("rdna4", 0, False)])
def test_operands_that_meet_in_a_bank(family:str, matrix:int, meet:bool) -> None:
  # The search for tiles knows the matrix instructions whose operands a wave reads with bank conflicts: CDNA's 16x16 instructions. The emulator counts
  # the same conflicts (test_banks.py).
  assert all(search.conflict(family, FAMILIES[family].matrix["float16"][matrix], stride) == meet for stride in (5, 9, 17, 33))

def test_an_even_stride_conflicts() -> None: assert search.conflict("rdna4", FAMILIES["rdna4"].matrix["float16"][0], 8)

class Bounds:
  # Stand-in for the compiler in the search for tiles: it returns the figures that `rule` gives, and records the tiles asked for.
  def __init__(self, monkeypatch:pytest.MonkeyPatch, rule:Callable[[UpTo[ForwardShape]], dict[str, int]|None]):
    self.seen, self.rule = list[UpTo[ForwardShape]](), rule
    monkeypatch.setattr(search, "first_bound", self)
  def __call__(self, arch:str, row:UpTo[ForwardShape], dtype:str="", mask:str="") -> Bound|None:
    if row not in self.seen: self.seen.append(row)
    c = row.shape
    figures = {"enough": 2, "ahead": min(c.prefetch, 1), "small": -c.waves*c.q_tiles*32, "short": -c.block_n}
    return bound(**figures | found) if (found := self.rule(row)) is not None else None

def test_a_second_buffer_is_tried_on_the_leading_tiles(monkeypatch:pytest.MonkeyPatch) -> None:
  asked = Bounds(monkeypatch, lambda row: {"issued": 120 + (row.shape.prefetch == 2) - row.shape.block_n//64})
  found = search.search_class("gfx950", 128)
  doubled = [row for row in asked.seen if row.shape.prefetch == 2]
  assert 1 <= len(doubled) <= 2*search.LEADING and not any(row.shape.prefetch == 0 for row in asked.seen)
  assert all(x.row.shape.prefetch == 2 and x.row.shape.block_n == 32 for x in found.rows) and [search.queries(x) for x in found.rows] == [128]

@pytest.mark.parametrize(("ahead", "behind", "chosen"), [(True, True, 1), (False, True, 0), (False, False, 1)])
def test_no_prefetch_where_nothing_else_has_two_waves(monkeypatch:pytest.MonkeyPatch, ahead:bool, behind:bool, chosen:int) -> None:
  # The search prefers a tile with prefetch and two waves on each SIMD. If there is none, it takes a tile without prefetch and two waves, and if there
  # is none of these either, a tile with one wave.
  def rule(row:UpTo[ForwardShape]) -> dict[str, int]|None:
    if row.shape.prefetch == 2: return None
    if 2*search.held(row, get_chip("gfx942"), 128) > 512: return {"enough": 1}
    return {} if (ahead if row.shape.prefetch else behind) else None
  asked = Bounds(monkeypatch, rule)
  found = search.search_class("gfx942", 128)
  assert {x.row.shape.prefetch for x in found.rows} == {chosen} and any(row.shape.prefetch == 0 for row in asked.seen) == (not ahead)

def test_a_tile_that_spills_has_no_bound() -> None:
  pytest.importorskip("ziglang")
  assert search.first_bound("gfx1100", UpTo(128, ForwardShape(4, 2, 32))) is None
  assert (found := search.first_bound("gfx1100", UpTo(128, ForwardShape(8, 1, 32, fenced=True)))) is not None
  assert found.enough == 2 and found.issued < found.serial <= found.overlap and (found.small, found.short) == (-128, -32)

def test_where_no_tile_compiles_the_search_says_why(monkeypatch:pytest.MonkeyPatch) -> None:
  def refused(text:str, arch:str) -> str: raise search.CompileError(f"clang cannot compile this for {arch}")
  monkeypatch.setattr(search, "assembly", refused)
  assert search.why_none("gfx1201", 64) == "clang cannot compile this for gfx1201"
  monkeypatch.setattr(search, "candidates", lambda chip, d: [])
  assert search.why_none("gfx1201", 64) == "none of those looked at fits"

def test_the_table_is_what_the_search_finds() -> None:
  # The search finds the tiles that attn's tables have, here for the smallest head dimensions. `python -m attn.tune --check` compares all head
  # dimensions, which takes minutes.
  pytest.importorskip("ziglang")
  result = CliRunner().invoke(tune.main, ["--arch", "gfx1100", "--d", "256", "--jobs", "1", "--check"])
  assert result.exit_code == 0 and "attn/chips has these tiles" in result.output and "bounds, not measured" in result.output, result.output

# ***** the table *****

def test_the_table_is_whole() -> None:
  rows = search.all_tables()
  for family, own in rows.items(): assert search.with_table(text := search.file_of(family).read_text(), own) == text
  assert list(rows) == [name for name, family in FAMILIES.items() if family.forward]
  for arch in map(get_chip, search.SEARCHED):
    found = arch.unit.forward
    assert [(c.up_to, -c.llvm) for c in found] == sorted((c.up_to, -c.llvm) for c in found)
    assert {(d, -EVERY) for d in tuned.CLASSES} <= set(rows[arch.family])
    for d, up_to in rows[arch.family]:
      *large, last = [c for c in found if (c.up_to, -c.llvm) == (d, up_to)]
      assert last.fills == 0 and amd_tile(problem(D=d, Dv=d), arch, last).block_m <= search.SMALL_TILE     # every grid has a tile
      assert all(c.fills == search.FILLS and amd_tile(problem(D=d, Dv=d), arch, c).block_m > search.SMALL_TILE for c in large)

def searched(*tiles:UpTo[ForwardShape]) -> search.Class: return search.Class("gfx942", 64, (), tuple(RankedTile(c, bound()) for c in tiles))

def test_rows_are_merged_by_class() -> None:
  found = searched(UpTo(64, ForwardShape(8, 2, 32, fenced=True), fills=256), UpTo(64, ForwardShape(4, 1, 32)))
  old = search.all_tables()
  new = search.merged_rows(old, [found], 22)
  large, small = new["cdna3"][64, -EVERY]
  assert large.startswith("  UpTo(64, ForwardShape(8, 2, 32, fenced=True), fills=256),  ") and small.endswith("waves 2")
  assert search.differences(old, old) == [] and f"cdna3: + {large.partition('#')[0].strip()}" in search.differences(old, new)
  assert search.table_rows_in(search.with_table(search.file_of("cdna3").read_text(), new["cdna3"])) == new["cdna3"]
  assert {f: {k: v for k, v in rows.items() if (f, k) != ("cdna3", (64, -EVERY))} for f, rows in new.items()} == \
         {f: {k: v for k, v in rows.items() if (f, k) != ("cdna3", (64, -EVERY))} for f, rows in old.items()}

def test_rows_of_an_older_compiler_stand_only_where_they_differ() -> None:
  same, other = UpTo(64, ForwardShape(4, 1, 64)), UpTo(64, ForwardShape(8, 1, 64), fills=256)
  old = search.merged_rows({}, [searched(same)], 23)
  assert list(old["cdna3"]) == [(64, -EVERY)] and search.merged_rows(old, [searched(same)], 21) == old
  new = search.merged_rows(old, [searched(other, same)], 21)
  assert [line.partition("#")[0].strip() for line in new["cdna3"][64, -21]] == [
    "UpTo(64, ForwardShape(8, 1, 64), fills=256, llvm=21),", "UpTo(64, ForwardShape(4, 1, 64), llvm=21),"]
  assert new["cdna3"][64, -EVERY] == old["cdna3"][64, -EVERY]
  assert search.table_rows_in(search.with_table(search.file_of("cdna3").read_text(), new["cdna3"])) == new["cdna3"]
  assert len(search.differences(old, new)) == 2
  assert search.merged_rows(new, [searched(other, same)], 20) == new                     # equal to the rows of release 21
  assert search.merged_rows(new, [searched(same)], 21) == old                            # equal to the rows for every release
  assert list(search.merged_rows(new, [searched(same)], 20)["cdna3"]) == [(64, -EVERY), (64, -21), (64, -20)]

@pytest.mark.parametrize(("llvm", "tiles"), [(19, (20, 16)), (20, (20, 16)), (21, (21, 16)), (22, (1000, 16)), (30, (1000, 16))])
def test_rows_for_a_compiler(llvm:int, tiles:tuple[int, ...]) -> None:
  # A row of a table of tiles may name a release of LLVM: the newest release that it is for. Dispatch takes rows that are for the compiler's release;
  # if there are several for a head dimension, those that name the oldest release. If there are none, it takes rows without a release.
  shape = ForwardShape(4, 1, 32)
  table = (UpTo(64, shape), UpTo(64, shape, llvm=21), UpTo(64, shape, llvm=20), UpTo(128, ForwardShape(4, 1, 16)))
  assert [row.llvm if row.up_to == 64 else row.shape.block_n for row in rows_for(table, llvm)] == list(tiles)

def test_dispatch_takes_the_tiles_of_the_compiler() -> None:
  p, arch = problem(D=64, Dv=64), get_chip("gfx942")
  assert arch.llvm == 22 and choose_tile(p, arch) != choose_tile(p, replace(arch, llvm=21)) == choose_tile(p, replace(arch, llvm=19))
  wide = problem(B=4)
  assert choose(wide, get_chip("gfx950")).kernel == "dual_wave"
  older = choose(wide, replace(get_chip("gfx950"), llvm=21))
  assert older.kernel == "staggered" and "this kernel would spill registers; it needs LLVM 22" in str(older)

BAD_OPTIONS = [(["--write", "--check"], "give --write or --check, not both"), (["--arch", "gfx906"], "'gfx906' is not one of"),
               (["--d", "96"], "'96' is not one of"), (["--jobs", "0"], "0 is not in the range")]

@pytest.mark.parametrize(("words", "line"), BAD_OPTIONS)
def test_bad_options(words:list[str], line:str) -> None:
  result = CliRunner().invoke(tune.main, words)
  assert result.exit_code == 2 and line in result.output

# ***** fastest tiles by time *****

FAST = UpTo(128, ForwardShape(4, 2, 32, fenced=True))

def backward_winner(p:Problem, kernel:str) -> list[UpTo[BackwardShape]]: return tuned.kept_rows(p, REAL, kernel, BackwardShape, tuned.check_matrix)
def tiled_winner(p:Problem, arch:Chip) -> list[UpTo[TiledTile]]: return tuned.kept_rows(p, arch, "tiled", TiledTile, tuned.check_threads)

def test_a_winner_is_for_its_class_and_a_real_device(cache:Path) -> None:
  p = problem()
  before = choose_tile(p, REAL)
  assert not tuned.winner(p, REAL) and tuned.store(p, REAL, FAST, 1e-3) == cache
  assert tuned.winner(p, REAL) == tuned.winner(problem(Sq=3000, D=96), REAL) == [FAST]
  assert choose_tile(p, REAL) == amd_tile(p, REAL, FAST) != before
  assert choose_tile(p, get_chip("gfx942")) == before                                     # the emulator and attn.isa ignore stored tiles
  for other in (problem(Sq=9000), problem(D=64, Dv=64), problem(window=(-1, 0)), problem(dtype="bfloat16"), problem(softcap=20.0), problem(Hkv=4)):
    assert not tuned.winner(other, REAL)
  assert not tuned.winner(p, replace(REAL, name="gfx950"))
  tuned.store(problem(D=64, Dv=64), REAL, FAST, 1e-3)
  assert len(json.loads(cache.read_text())["gfx942"]) == 2 and tuned.winner(p, REAL) == [FAST]
  tuned.store(p, REAL, None, 1e-3)
  assert not tuned.winner(p, REAL) and choose_tile(p, REAL) == before

def test_a_winner_comes_before_the_dual_wave_kernel() -> None:
  arch, p = replace(get_chip("gfx950"), tuned=True), problem(B=4)
  assert choose(replace(p, Sq=4095), arch).kernel == "dual_wave"
  tuned.store(p, arch, FAST, 1e-3)
  assert choose(p, arch).kernel == "forward" and "TUNE=1" in str(choose(p, arch).why_not("dual_wave"))

GOOD = {"waves": 4, "q_tiles": 1, "block_n": 64}
def entry(**fields:Any) -> dict[str, Any]: return {"tile": GOOD | fields, "seconds": 1e-3, "stamp": STAMP}

@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"gfx942": 3}', '{"gfx942": null}', "[" * 100_000, "\0\0", '{"gfx942": {"KIND": 1}}'])
def test_a_damaged_cache_is_an_empty_one_with_one_warning(text:str, cache:Path, recwarn:pytest.WarningsRecorder) -> None:
  cache.parent.mkdir()
  cache.write_text(text.replace("KIND", str(tuned.problem_class(problem()))))
  assert not tuned.winner(problem(), REAL) and not tuned.winner(problem(), REAL)
  warning, = recwarn.list
  assert str(cache) in str(warning.message)

@pytest.mark.parametrize(("found", "word"), [
  (entry(waves="4"), "waves='4'"), (entry(waves=0), "waves=0"), (entry(waves=1000), "waves=1000"), (entry(waves=True), "waves=True"),
  (entry(q_tiles=None), "q_tiles=None"), (entry(matrix=99), "matrix=99"), (entry(up_to=128, fills=0), "fills: a tile has no such field"),
  (entry(wheels=3), "wheels"),
  (entry(block_n=16), "block_n=16"), (entry(fenced=1), "fenced=1"), ({"tile": {"waves": 4}, "stamp": STAMP}, "q_tiles"),
  ({"tile": [1]}, "tile=[1]"), ({}, "without a tile"), ({**entry(), "stamp": {**STAMP, "compiler": "clang version 19"}}, "clang version 19"),
  ({k: v for k, v in entry().items() if k != "stamp"}, "was made with attn None")])
def test_an_entry_that_is_no_tile_is_ignored(found:dict[str, Any], word:str, cache:Path, recwarn:pytest.WarningsRecorder) -> None:
  cache.parent.mkdir()
  cache.write_text(json.dumps({"gfx942": {tuned.problem_class(problem()): found}}))
  assert not tuned.winner(problem(), REAL) and choose_tile(problem(), REAL) == choose_tile(problem(), get_chip("gfx942"))
  warning, = recwarn.list
  assert str(cache) in str(warning.message) and word in str(warning.message)

def test_a_good_entry_is_taken(cache:Path, recwarn:pytest.WarningsRecorder) -> None:
  cache.parent.mkdir()
  cache.write_text(json.dumps({"gfx942": {tuned.problem_class(problem()): entry()}}))
  assert tuned.winner(problem(), REAL) == [UpTo(128, ForwardShape(4, 1, 64))] and not recwarn.list

@pytest.mark.parametrize("keys", (7, 150, 1000))
def test_a_winner_of_few_keys_takes_whole_operands(keys:int) -> None:
  # attn makes the fastest tile smaller for a problem with few keys, but always a multiple of 32 keys: an operand of the second product takes 32 keys
  # with 16x16x16 matrix instructions. In an earlier version a tile of 16 keys left this product without an operand.
  p, arch = problem(Sq=40, Sk=keys), get_chip("gfx942")
  tile = amd_tile(p, arch, UpTo(128, ForwardShape(4, 1, 128), matrix=1))
  assert tile.matrix.M == 16 and tile.block_n % 32 == 0

def test_what_cannot_be_kept() -> None:
  with pytest.raises(ValueError, match="softcap: TUNE=1 times tiles only for problems without"): tuned.store(problem(softcap=20.0), REAL, FAST, 1e-3)

# ***** TUNE=1 *****

def small_space(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(search, "SPACE", {"waves": (4,), "q_tiles": (1,), "block_n": (64, 32), "q_in_lds": (False,), "fenced": (False, True)})

def settings(monkeypatch:pytest.MonkeyPatch, **values:str) -> bench.Settings:
  for name, value in values.items(): monkeypatch.setenv(name, value)
  bench.getenv.cache_clear()
  try: return bench.settings(bench.ON_THE_EMULATOR)
  finally: bench.getenv.cache_clear()

def clock(s:bench.Settings, fastest:Callable[[Tile], bool]) -> tiles_by_time.Seconds:
  # Returns a stand-in for the timer: it runs a kernel, and returns a short time for tiles that `fastest` selects.
  run = bench.device_timer(s)
  def seconds(program:Callable[..., UOp], tile:Tile) -> float:
    assert run(program, tile) >= 0
    return 1e-3 if fastest(tile) else 2e-3
  return seconds

def test_tuning_keeps_the_fastest(monkeypatch:pytest.MonkeyPatch) -> None:
  small_space(monkeypatch)
  with Context(DEV="EMU::gfx942"):
    s = settings(monkeypatch, H="2", N="128", D="64")
    table = tiles_by_time.time_forward(s.problem, REAL, clock(s, lambda tile: tile.block_n == 32 and tile.fenced))
    assert tuned.winner(s.problem, REAL) == [UpTo(64, ForwardShape(4, 1, 32, fenced=True))]
    assert table[0] | {"options": "fenced", "ms": 1.0, "chosen by": ""} == table[0] and "128x32 4 waves" in table[0]["tile"]
    assert [row["ms"] for row in table] == sorted(row["ms"] for row in table) and len({(row["tile"], row["options"]) for row in table}) == len(table)
    own = choose_tile(s.problem, get_chip("gfx942"))
    tiles_by_time.time_forward(s.problem, REAL, clock(s, lambda tile: tile == own))
    assert not tuned.winner(s.problem, REAL)                                          # the table's own tile won

def test_tuning_of_tiled_keeps_the_fastest(monkeypatch:pytest.MonkeyPatch) -> None:
  real = replace(get_chip("gfx1030"), tuned=True)
  with Context(DEV="EMU::gfx1030"):
    s = settings(monkeypatch, H="2", N="128", D="64", DTYPE="float32")
    own, *others = dict.fromkeys((tiled_tile(s.problem, get_chip("gfx1030")), *tiled_space(s.problem, real)))
    table = tiles_by_time.time_forward(s.problem, real, lambda program, tile: 1e-3 if tile == others[3] else 2e-3)
    assert len(table) == 1 + len(others) > 20 and table[0]["tile"] == str(others[3]) and table[0]["chosen by"] == ""
    assert tiled_winner(s.problem, real) == [UpTo(64, others[3])]
    assert tiled_tile(s.problem, real) == choose(s.problem, real).work.tile == others[3] != own
    assert tiled_tile(s.problem, get_chip("gfx1030")) == own                               # the emulator keeps its own tile
    tiles_by_time.time_forward(s.problem, real, lambda program, tile: 1e-3 if tile == own else 2e-3)
    assert not tiled_winner(s.problem, real)                                     # the table's own tile won

def test_tuning_the_backward_of_tiled_keeps_the_fastest_of_each_kernel(monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  # Tuning by time (TUNE=1) keeps the fastest tile of each backward kernel of plain UOps. It skips a tile that the device refuses, with a message.
  real, seen, of_backward = replace(get_chip("gfx1030"), tuned=True), list[TiledBackwardTile](), TiledBackwardTile(2, 2, 4, 4, 4, 4)
  for table in ("DQ_TILED", "DKDV_TILED"): monkeypatch.setattr(tiled_tiles, table, (UpTo(4, of_backward),))
  with Context(DEV="EMU::gfx1030"):
    s = settings(monkeypatch, H="1", N="8", D="4", DTYPE="float32", BWD="1")
    def chosen(chip:Chip) -> tuple[TiledBackwardTile, ...]: return tuple(tiled_backward_tile(s.problem, chip, keys) for keys in (False, True))
    own = chosen(get_chip("gfx1030"))
    for name, of_table in zip(("dq", "dkdv"), own):
      launch = tiles_by_time.backward_launch(s.problem, real, name, of_table)
      given = [UOp.placeholder(shape, FLOATS[dtype], i) for i, (shape, dtype) in enumerate(launch.shapes.values())]
      assert f"_backward_{name}_tiled_" in launch.kernel(*given).arg.name
      refused, fastest = tiled_backward_space(s.problem, real, name == "dkdv")[1:3]
      def seconds(of:str, tile:Any) -> float:
        assert of == name and tile.keys == (of == "dkdv")
        if tile == refused: raise RuntimeError("CL_INVALID_WORK_GROUP_SIZE")
        return 1e-3 if tile == fastest else 2e-3
      timed, kernel = tiles_by_time.time_backward(s.problem, real, name, seconds), f"backward_{name}_tiled"
      assert len(timed) > 20 and timed[0] | {"kernel": kernel, "tile": str(fastest), "ms": 1.0, "chosen by": ""} == timed[0]
      assert f"{kernel}, tile {refused}: CL_INVALID_WORK_GROUP_SIZE" in capsys.readouterr().err
      seen.append(fastest)
    assert chosen(real) == tuple(seen) and chosen(get_chip("gfx1030")) == own
    assert not tiled_winner(s.problem, real)
    tiles_by_time.time_backward(s.problem, real, "dq", lambda name, tile: 1e-3 if tile == own[0] else 2e-3)
    assert chosen(real) == (own[0], seen[1])                      # the table's own tile won

def test_tuning_the_backward_where_tiles_were_measured(monkeypatch:pytest.MonkeyPatch) -> None:
  with Context(DEV="EMU::sm_90"):
    s = settings(monkeypatch, H="2", N="128", D="64", BWD="1")
    with pytest.raises(NotImplementedError, match="TUNE=1 with BWD=1 on sm_90: it is for AMD's kernels and those of plain UOps"):
      tiles_by_time.backward_tiles_to_tune(s.problem, get_chip("sm_90"))
    wide = settings(monkeypatch, D="264")
    assert all(isinstance(x, TiledBackwardTile) for x in tiles_by_time.backward_tiles_to_tune(wide.problem, get_chip("sm_90")))

@pytest.mark.parametrize("fields, said", [
  ({"down": 3}, "down=3: must be one of 1, 2"), ({"values": 48}, "values=48: must be one of"), ({"columns": 8}, "its sizes contradict each other"),
  ({"down": 1, "across": 1}, "65536 bytes of local memory"), ({"waves": 4}, "waves: a tile has no such field"),
  ({"keys": 1}, "keys=1: must be one of False, True"), ({"keys": False, "ahead": True}, "ahead=True: must be one of False")])
def test_an_unsupported_tile_of_tiled_is_ignored(fields:dict[str, Any], said:str, cache:Path, recwarn:pytest.WarningsRecorder) -> None:
  # The file of fastest tiles may contain a tile that the kernel of plain UOps does not support. attn ignores it with one warning. If `fields`
  # contains `keys`, the tile is for a backward kernel.
  chip, p = replace(get_chip("gfx1030"), tuned=True), problem(D=64, Dv=64, dtype="float32")
  tile: dict[str, Any] = {"down": 8, "across": 16, "walked": 4, "own": 4, "depth": 16, "values": 16}
  kind, kernel = (TiledBackwardTile, "backward_dq_tiled") if "keys" in fields else (TiledTile, "tiled")
  row = tuned.row_in_entry({"tile": tile}, kind, 64)
  assert row == UpTo(64, kind(**tile))
  tuned.check_threads(row, chip, p)
  cache.parent.mkdir()
  cache.write_text(json.dumps({"gfx1030": {tuned.entry_of(p, kernel): {"tile": tile | fields, "seconds": 1e-3, "stamp": STAMP}}}))
  for _ in range(2): assert not tuned.kept_rows(p, chip, kernel, kind, tuned.check_threads)
  warning, = recwarn.list
  assert said in str(warning.message) and str(cache) in str(warning.message)

def test_tuning_leaves_out_what_spills(monkeypatch:pytest.MonkeyPatch) -> None:
  pytest.importorskip("ziglang")
  monkeypatch.setattr(search, "SPACE", {"waves": (4,), "q_tiles": (2, 1), "block_n": (16,), "q_in_lds": (False,), "fenced": (False,)})
  s, arch, seen = settings(monkeypatch, H="2", N="512", D="128"), replace(get_chip("gfx1201"), tuned=True), list[Tile]()
  tiles_by_time.time_forward(s.problem, arch, lambda program, tile: float(len(seen.append(tile) or seen)))    # type: ignore[func-returns-value]
  assert [row.shape.q_tiles for row in search.candidates(arch, 128)] == [2, 1] and len(seen) == 2 and all(tile.q_tiles == 1 for tile in seen)

def test_every_field_of_a_tile_can_be_read_again() -> None:
  # TUNE=1 writes all fields of a tile. The reader refuses a tile with a field for which it has no limits.
  for kind, limits in tuned.LIMITS.items(): assert {field.name for field in fields(kind)} == limits.keys() - {"matrix"}, kind

def test_tuning_the_backward_keeps_the_fastest_of_each_kernel(monkeypatch:pytest.MonkeyPatch) -> None:
  space = {"waves": (4,), "block_n": (32,), "own_in_lds": ((False, False),), "fenced": (0, 2, 4), "prefetch": (1,), "sparing": (False,),
           "passes": (1,)}
  monkeypatch.setattr(backward_search, "BACKWARD_SPACE", space)
  with Context(DEV="EMU::gfx942"):
    s = settings(monkeypatch, H="2", N="128", D="64", BWD="1")
    run = bench.backward_timer(s, get_chip("gfx942"))
    def seconds(name:str, tile:BackwardTile) -> float:
      assert run(name, tile) >= 0
      return 1e-3 if tile.fenced == 4 else 2e-3
    for name in ("dq", "dkdv"):
      table = tiles_by_time.time_backward(s.problem, REAL, name, seconds)
      assert table[0] | {"kernel": f"backward_{name}", "options": "fenced=4", "ms": 1.0, "chosen by": ""} == table[0] and len(table) == 3
      assert backward_winner(s.problem, f"backward_{name}") == [UpTo(64, BackwardShape(4, 32, fenced=4))]
    assert [amd_backward_tile(s.problem, REAL, keys).fenced for keys in (False, True)] == [4, 4]
    assert [amd_backward_tile(s.problem, get_chip("gfx942"), keys).fenced for keys in (False, True)] == [0, 2]
    assert not tuned.winner(s.problem, REAL)

def test_bounds_of_the_backwards_tiles(monkeypatch:pytest.MonkeyPatch) -> None:
  pytest.importorskip("ziglang")
  few = {"waves": (4,), "block_n": (16,), "own_in_lds": ((False, False),), "fenced": (0,), "prefetch": (1, 0), "sparing": (False,)}
  monkeypatch.setattr(backward_search, "BACKWARD_SPACE", {**backward_search.BACKWARD_SPACE, **few})
  monkeypatch.setattr(backward_search, "VARIANTS", [("float16", "full")])
  first, second = backward_search.ranked_backward("gfx1201", 32, "dq")
  assert (first.row.shape.prefetch, second.row.shape.prefetch) == (1, 0)
  assert 0 < first.bound.predicted < 200 and 0 < first.bound.serial < 200       # in half percents of the dense rate

@pytest.mark.parametrize("d, keys", ((64, False), (128, True), (256, True)))
def test_the_backwards_space(d:int, keys:bool) -> None:
  # The search for backward tiles tries fewer than 500 tiles. One of them has as many waves, keys and passes as the tile of attn's tables.
  for arch in ("gfx942", "gfx1201"):
    found = backward_search.backward_candidates(get_chip(arch), d, keys)
    own = amd_backward_tile(problem_of_spec(Spec(arch, d)), get_chip(arch), keys)
    assert any((x.shape.waves, x.shape.block_n, x.shape.passes) == (own.waves, own.block_n, own.passes) for x in found) and len(found) < 500

def test_the_emulator_is_not_timed() -> None:
  env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV", "XDG_CACHE_HOME")} | {"DEV": "EMU::gfx942"}
  result = subprocess.run([sys.executable, "bench.py"], capture_output=True, text=True, timeout=120, cwd=ROOT, env=env | {"TUNE": "1"})
  assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stdout == ""
  assert "TUNE=1: needs a GPU" in result.stderr and "search over bounds" in result.stderr
