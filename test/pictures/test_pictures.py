"""Tests of the pictures in docs: they agree with the current tables of the kernels, and with the text beside them."""
from __future__ import annotations
import functools, itertools, re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from attn import mods
from attn.chips.matrix import contraction
from attn.emulator.chips import INSTRUCTIONS
from attn.pictures import functions as of_mods, key_ranges, matrices, shared_memory, tile_map, zigzag
from attn.pictures import __main__ as command
from attn.reference import visible

pictures = functools.cache(command.pictures)
ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT/"docs"/"pictures"
AMD = {name: mat for name, (mat, _) in matrices.DRAWN.items()}
PANELS = {f"{page}: {panel.title}": panel for page, (_, _, panels, _) in shared_memory.PAGES.items() for panel in panels}

def test_the_committed_pictures_are_current() -> None:
  drawn = pictures()
  assert {path.name for path in FOLDER.glob("*.svg")} == set(drawn)
  stale = [name for name, text in drawn.items() if (FOLDER/name).read_text(encoding="utf-8") != text]
  assert not stale, f"{', '.join(stale)}: run python -m attn.pictures"

def test_they_are_all_shown() -> None:
  pages = [(ROOT/"docs"/name).read_text() for name in ("algorithm.md", "sharding.md", "functions.md")]
  shown = [name for page in pages for name in re.findall(r"!\[[^\]]+\]\(pictures/([\w.]+)\)", page)]
  assert sorted(shown) == sorted(pictures())

def test_the_command_writes_them(tmp_path:Path) -> None:
  assert command.main([str(tmp_path)]) == 0 and {path.name for path in tmp_path.iterdir()} == set(pictures())

def test_a_folder_that_is_not_there_is_an_error(capsys:pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit): command.main(["no such folder"])
  assert "no such folder is not a folder" in capsys.readouterr().err

@pytest.mark.parametrize("name", pictures())
def test_nothing_lies_outside(name:str) -> None:
  # Each picture is valid XML, and its words and cells lie inside the picture. The test takes a letter to be 0.6 times as wide as the font size, which
  # is more than in usual fonts.
  root = ElementTree.fromstring(pictures()[name])
  width, height = float(root.attrib["width"]), float(root.attrib["height"])
  for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
    x, y, w, h = (float(shape.attrib[key]) for key in ("x", "y", "width", "height"))
    assert 0 <= x <= x + w <= width and 0 <= y <= y + h <= height
  for path in root.iter("{http://www.w3.org/2000/svg}path"):
    for x, y, w, h in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", path.attrib["d"]):
      assert float(x) + float(w) <= width and float(y) + float(h) <= height
  for text in root.iter("{http://www.w3.org/2000/svg}text"):
    long = 0.6*float(text.attrib["font-size"])*len(text.text or "")
    left = float(text.attrib["x"]) - {"middle": long/2, "end": long}.get(text.attrib.get("text-anchor", ""), 0)
    assert left >= 0 and left + long <= width and float(text.attrib["y"]) <= height, text.text

# ***** lane and element *****

@pytest.mark.parametrize("name", AMD)
def test_each_lane_holds_as_many_elements_as_it_has_registers_for(name:str) -> None:
  mat = AMD[name]
  a, c = matrices.operand_cells(mat), matrices.accumulator_cells(mat)
  assert len(a) == mat.M*contraction(mat, 1) and {len(x) for x in a.values()} == {mat.groups if mat.duplicated else 1}
  assert len(c) == mat.M*mat.N
  for lane in range(mat.wave):
    held = sorted((x.step, x.element) for holders in a.values() for x in holders if x.lane == lane)
    steps = contraction(mat, 1)//mat.K
    assert held == list(itertools.product(range(steps), range(mat.operand)))
    assert sorted(x.element for holders in c.values() for x in holders if x.lane == lane) == list(range(mat.accumulator))

@pytest.mark.parametrize("name", AMD)
def test_c_is_where_the_emulator_has_it(name:str) -> None:
  # The pictures of AMD's matrix instructions show each element of C in the lane and register in which the emulator has it. The emulator's layouts
  # come from the ISA documents, and not from the kernels' tables.
  mat = AMD[name]
  numbers = np.arange(mat.accumulator*mat.wave).reshape(mat.accumulator, mat.wave)
  columns, = INSTRUCTIONS[mat.name].c.to_matrices(numbers, lambda x: x)
  for (row, column), (holder,) in matrices.accumulator_cells(mat).items():
    assert columns[column, row] == numbers[holder.element, holder.lane]

@pytest.mark.parametrize("name", AMD)
def test_every_key_is_once_in_the_order_of_p(name:str) -> None:
  mat = AMD[name]
  order = matrices.key_order(mat)
  assert sorted(key for _, key in order) == list(range(contraction(mat, mat.M)))
  c = matrices.accumulator_cells(mat)
  for n, (h, key) in enumerate(order):      # the lane that needs a key in the second product holds it after the first product
    assert c[key % mat.M, 0][0].lane == h*mat.N, n

def test_mma_fragments() -> None:
  # The picture of mma.sync shows the fragments of m16n8k16 as PTX ISA 9.7.14.5.8 defines them: groupID = lane/4, threadID_in_group = lane%4.
  mat = matrices.MMA["float16"]
  for lane, i in itertools.product(range(32), range(8)):
    row, column = lane//4 + 8*(i//2 % 2), lane%4*2 + i%2 + 8*(i//4)
    assert matrices.mma_a(mat)[row, column] == [matrices.Holder(lane, 0, i)]
  for lane, i in itertools.product(range(32), range(4)):
    assert matrices.mma_b(mat)[lane%4*2 + i%2 + 8*(i//2), lane//4] == [matrices.Holder(lane, 0, i)]
    assert matrices.mma_c(mat)[lane//4 + 8*(i//2), lane%4*2 + i%2] == [matrices.Holder(lane, 0, i)]

# ***** key ranges *****

@pytest.mark.parametrize("name", key_ranges.CASES)
def test_key_ranges_hold_what_is_seen(name:str) -> None:
  p = key_ranges.CASES[name]
  seen = visible(p.Sq, p.Sk, p.window, p.offset)
  for block in range(-(-p.Sq//key_ranges.QUERY_BLOCK)):
    r, rows = key_ranges.range_of(p, block), seen[block*key_ranges.QUERY_BLOCK:(block + 1)*key_ranges.QUERY_BLOCK]
    for tile in range(-(-p.Sk//key_ranges.KEY_TILE)):
      part = rows[:, tile*key_ranges.KEY_TILE:(tile + 1)*key_ranges.KEY_TILE]
      assert (r.begin <= tile < r.end) == part.any()
      assert (r.full_begin <= tile < r.full_end) == (part.all() and part.shape[1] == key_ranges.KEY_TILE)

# ***** functions of attn.mods *****

def test_every_function_of_mods_is_drawn_and_listed() -> None:
  named = {name for name, x in vars(mods).items() if callable(x) and x.__module__ == mods.__name__}
  assert {re.split(r"\W", panel.title)[0] for panel in of_mods.PANELS} == named
  assert {name for name, x in re.findall(r"^\| `(\w+)(\(.*\))?` \|", (ROOT/"docs/functions.md").read_text(), re.MULTILINE)} > named

def test_panels_show_the_functions() -> None:
  panels, places = {panel.title: panel for panel in of_mods.PANELS}, np.arange(of_mods.PLACES)
  i, j = places[:, None], places
  assert (panels["causal"].values() == np.tri(len(places))).all()
  assert (panels["documents"].values() == (of_mods.IN_DOCUMENT.T == of_mods.IN_DOCUMENT)).all()
  assert (panels["sliding_tile(8, 1)"].values() == ((abs(i//8 - j//8) < 2) & (abs(i%8 - j%8) < 2))).all()
  assert (panels["alibi_bias, slope 0.25"].values() == -abs(i - j)/4).all()
  scores, found = panels["tanh_softcap(3)"].values()
  np.testing.assert_allclose(found[0], 3*np.tanh(scores/3), atol=1e-6)
  scores, found = panels["head_scale"].values()
  np.testing.assert_allclose(found, np.outer([0.25, 0.5, 1], scores), atol=1e-6)

# ***** maps of masks *****

def cells_of(picture:str) -> dict[tuple[float, float, float, float], str]:
  # Returns the colour of each cell (x, y, width, height) of a picture.
  root = ElementTree.fromstring(picture)
  return {tuple(map(float, cell)): path.attrib["fill"] for path in root.iter("{http://www.w3.org/2000/svg}path")     # type: ignore[misc]
          for cell in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", path.attrib["d"])}

OWN_MASKS = """
def near(b, h, i, j): return (i - j).abs() < 150
def even(b, h, i, j): return (i - j).abs() % 2
SIZE = 3
def numbers_equal(b, h, i, j, numbers): return numbers[i] == numbers[j]
"""

def drawn_map(folder:Path, *arguments:str) -> str:
  # Runs `python -m attn.pictures map`, which draws which tiles a kernel skips under a mask, and returns the picture as SVG text.
  (folder/"own.py").write_text(OWN_MASKS)
  assert command.main(["map", *[x.replace("own.py", str(folder/"own.py")) for x in arguments], "--out", str(folder/"map.svg")]) == 0
  return (folder/"map.svg").read_text(encoding="utf-8")

@pytest.mark.parametrize("kernel", tile_map.KERNELS_OF_MAP)
def test_a_map_shows_what_queries_see(kernel:str, tmp_path:Path) -> None:
  # The picture of a mask that `python -m attn.pictures map` draws has a cell for each tile of scores. The cell's colour says whether the tile's
  # queries see all, some or none of its keys. The cells fill the picture, also if the numbers of queries and keys are no multiples of the tile. The
  # picture says which share of the tiles has each colour, and these shares are right.
  sq, sk = 700, 1000
  picture = drawn_map(tmp_path, "own.py:near", "--sq", str(sq), "--sk", str(sk), "--kernel", kernel, "--heads", "8", "--kv-heads", "2", "--d", "64")
  cells, scale, found = cells_of(picture), tile_map.LONGER_SIDE/sk, dict[str, int]()
  i, j = np.arange(sk - sq, 2*sk)[:, None], np.arange(2*sk)      # beyond the last query and key, too: the last block counts rows that do not exist
  seen = abs(i - j) < 150
  assert sum(w*h for _, _, w, h in cells) == pytest.approx(sq*sk*scale**2, rel=1e-3)
  height, width = max(h for *_, h in cells), max(w for _, _, w, _ in cells)
  for (x, y, w, h), fill in cells.items():
    top, left, rows, columns = (round(n/scale) for n in (y - tile_map.MAP_TOP, x - 20, h, w))
    part = seen[top:top + rows, left:left + columns]
    block = seen[top:top + round(height/scale), left:left + columns] if kernel != "dkdv" else seen[top:top + rows, left:left + round(width/scale)]
    whole = block.all() and (columns == round(width/scale) if kernel != "dkdv" else rows == round(height/scale))
    expected = tile_map.NO_MASK if whole else tile_map.WITH_MASK if part.any() else tile_map.SKIPPED
    assert fill == tile_map.FILLS_OF_MAP[expected][0], (top, left)
    found[fill] = found.get(fill, 0) + 1
  for fill, words in tile_map.FILLS_OF_MAP.values(): assert f"{words}: {100*found[fill]/len(cells):.1f} %" in picture

def test_a_map_of_lists(tmp_path:Path) -> None:
  # The picture of visible tiles is right for a mask that reads a tensor with the document of each position. With 8 documents of 128 positions, each
  # block of 128 queries sees only the tile of its own document.
  np.save(tmp_path/"numbers.npy", np.arange(1024, dtype=np.int32)//128)
  cells = cells_of(drawn_map(tmp_path, "own.py:numbers_equal", "--tensors", str(tmp_path/"numbers.npy")))
  for (x, y, _, h), fill in cells.items():
    own = round((y - tile_map.MAP_TOP)/h) == int((x - 20)*1024/tile_map.LONGER_SIDE + 0.5)//128
    assert h == tile_map.LONGER_SIDE/8 and fill == tile_map.FILLS_OF_MAP[tile_map.NO_MASK if own else tile_map.SKIPPED][0]

def test_the_page_shows_the_command_of_its_map(tmp_path:Path) -> None:
  # The command in docs/functions.md draws the picture below it.
  words, = re.findall(r"^python -m attn\.pictures map (.*) --out map\.svg$", (ROOT/"docs/functions.md").read_text(), re.MULTILINE)
  assert drawn_map(tmp_path, *words.split()) == pictures()["tile_map.svg"]

BAD_MAPS = {
  "own.py:": "'own.py:' names no function: must be package.module:name or file.py:name", "nothing:f": "nothing cannot be imported: No module named",
  "nothing.py:f": "there is no file nothing.py", "attn.mods:nothing": "attn.mods has no 'nothing'", "own.py:SIZE": "mask_mod=3: must be a function",
  "own.py:even": "must be bool", "attn.mods:sliding_window": "cannot be called with 4 arguments, b, h, i, j and 0 of mod_tensors",
  "attn.mods:sliding_window --arguments 1 2": "with the arguments 1, 2 raised TypeError", "attn.mods:causal --arch gfx1": "arch='gfx1' is not known",
  "own.py:numbers_equal": "missing a required argument: 'numbers'", "attn.mods:causal --sq 0": "Sq=0: must be a whole number",
  "attn.mods:causal --tensors nothing.npy": "No such file", "own.py:near --sq 90000 --sk 90000": "a map shows at most 65536 tiles",
  "attn.mods:causal --heads 3 --kv-heads 2": "H=3 query heads are not a multiple of Hkv=2",
  "attn.mods:causal --kernel forth": "invalid choice: 'forth'"}

@pytest.mark.parametrize("words", BAD_MAPS)
def test_a_map_that_cannot_be_drawn(words:str, tmp_path:Path, capsys:pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit): drawn_map(tmp_path, *words.split())
  message = capsys.readouterr().err.splitlines()[-1].replace(f"{tmp_path}/", "")
  assert BAD_MAPS[words] in message and not (tmp_path/"map.svg").exists()

# ***** banks *****

@pytest.mark.parametrize("name", PANELS)
def test_no_access_meets_itself_in_a_bank(name:str) -> None:
  panel = PANELS[name]
  for access in panel.accesses:
    assert len({panel.group(piece) for piece in access.pieces}) == len(access.pieces) == panel.groups, access.words

def test_a_stride_without_its_odd_unit_would_meet() -> None:
  panel = PANELS["lds_forward: K, D = 64"]
  packed = replace(panel, place=lambda row, unit: row*8 + unit)
  assert len({packed.group(piece) for piece in packed.accesses[0].pieces}) == 1

# ***** a sequence on several devices *****

def test_the_zigzag_computes_each_visible_pair_once_and_shares_the_work() -> None:
  seen = visible(zigzag.LENGTH, zigzag.LENGTH, (-1, 0), 0)
  for order in ("contiguous", "zigzag"):
    owner, pairs = zigzag.computed(order)
    assert ((owner >= 0) == seen).all() and sum(pairs) == seen.sum()
    rows = seen.sum(1).reshape(zigzag.DEVICES, -1) if order == "contiguous" else seen.sum(1).reshape(2, zigzag.DEVICES, -1)
    assert pairs == list((rows if order == "contiguous" else np.concatenate([rows[0], rows[1][::-1]], 1)).sum(1))
  assert min(pairs) == max(pairs)
