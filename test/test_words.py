"""Rules for the words of the project: docstrings name what they describe, and pages name only existing files and names."""
import ast, re
from collections.abc import Iterator
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path for folder in ("attn", "test", "examples") for path in (ROOT/folder).rglob("*.py")) + [ROOT/"bench.py"]
PAGES = sorted((ROOT/"docs").glob("*.md")) + [ROOT/name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
BLOCK, TEXT_BLOCK = r"^```.*?^```$", re.MULTILINE | re.DOTALL

# ***** docstrings *****

# A docstring that begins with one of these words refers to the code above it, which a reader of the docstring alone does not see.
POINTS_ELSEWHERE = re.compile(r"(That|Those|These|The same|The others?|Of|Their|Its|It|They|Them|In|On|At|By|To|From|For|With|Without|As|Among|"
                              r"Beside|Into|Over|Under|Between|After|Before|Than|Likewise|There|So|Such)\b")

def docstrings(program:str) -> Iterator[tuple[int, str]]:
  for node in ast.walk(ast.parse(program)):
    if isinstance(node, ast.Module|ast.ClassDef|ast.FunctionDef) and (text := ast.get_docstring(node)): yield getattr(node, "lineno", 1), text

def points_elsewhere(program:str) -> list[int]:
  # Returns the line numbers of docstrings that begin with a pronoun or a preposition.
  return [line for line, text in docstrings(program) if POINTS_ELSEWHERE.match(text)]

def test_docstrings_begin_with_what_they_describe() -> None:
  assert points_elsewhere('"""These are rows."""\ndef f():\n  """Of a row."""\ndef g():\n  """Itself a row."""\ndef h(): pass') == [1, 2]
  found = [f"{path.relative_to(ROOT)}:{line}" for path in PROGRAMS for line in points_elsewhere(path.read_text())]
  assert not found

# ***** how long the pages are *****

def prose(page:str) -> list[str]:
  # Returns the words of a page, except those in code blocks, tables, pictures, comments and addresses of links.
  for pattern in (BLOCK, r"<!--.*?-->", r"!\[[^\]]*\]\([^)]*\)", r"(?<=\])\([^)]*\)"): page = re.sub(pattern, "", page, flags=TEXT_BLOCK)
  return " ".join(line for line in page.splitlines() if not line.lstrip().startswith("|")).split()

def test_the_pages_are_short() -> None:
  assert prose("# A head\n\n```\ncode\n```\n| a | b |\n![seen](x.svg)\n<!-- no -->\na [link](to.md#it)") == ["#", "A", "head", "a", "[link]"]
  assert 10000 < sum(len(prose(page.read_text())) for page in (ROOT/"docs").glob("*.md")) <= 15000

# ***** files, links and names *****

FILES = [path.relative_to(ROOT) for name in ("*.*", ".ci/*", *(f"{folder}/**/*.*" for folder in ("attn", "docs", "examples", "test")))
         for path in ROOT.glob(name)]
TYPES = "py|md|csv|txt|svg|png|sh|toml"
# Files of other projects, and files that a command of a page writes.
ELSEWHERE = {"examples/gpt2.py", "examples/llama.py", "examples/whisper.py", "extra/models/t5.py", "tinygrad/llm/model.py",
             "docs/compatibility/compatibility-matrix-historical-6.0.csv",
             "docs/mem_latency.md", "docs/mfma-valu-coissue.md", "h200.csv", "h200.png", "f.csv", "f.png", "trip.svg", "map.svg"}

def missing_files(text:str) -> list[str]:
  # Returns the file names in a text for which no file exists. A name may omit the first folders of the path.
  there = {"/".join(path.parts[i:]) for path in FILES for i in range(len(path.parts))}
  named = re.findall(rf"(?<![\w/.*-])([\w.][\w./-]*\.(?:{TYPES}))(?![\w*])", re.sub(r"https?://\S+", "", text))
  return sorted({name for name in named if (bare := name.removeprefix("../")) not in there and bare not in ELSEWHERE})

@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page:Path) -> None:
  assert missing_files("attn/nothing.py, see chips/rdna.py, bench.py and nothing.md") == ["attn/nothing.py", "nothing.md"]
  assert not missing_files(page.read_text())

def test_pages_that_programs_name_exist() -> None:
  missing = {(str(path.relative_to(ROOT)), name) for path in PROGRAMS if path != Path(__file__)
             for name in re.findall(r"(?<![\w/])docs/[\w/-]+\.(?:md|csv|txt)", path.read_text())
             if not (ROOT/name).exists() and name not in ELSEWHERE}
  assert not missing

# Names in backticks that the project does not define: instructions, variables and functions of other programs, and placeholders.
OTHERS = {"compilersupport", "ds_bpermute", "ds_permute", "ds_swizzle", "every_kernel", "gfxNNNN", "reg5", "sched_group_barrier", "TC", "ulimit",
          "UPAT_COMPILE", "v_cos", "v_log", "v_pk_add_f32", "v_rcp", "v_rsq", "v_sin", "v_sqrt", "__launch_bounds__"}

def unknown_names(text:str) -> list[str]:
  # Returns the names in backticks in a text that occur nowhere in the project's programs.
  sources = [path.read_text() for path in [*PROGRAMS, ROOT/".ci/run", ROOT/"pyproject.toml"] if path != Path(__file__)]
  known = set(re.findall(r"\w+", " ".join(sources)))
  for name in ELSEWHERE: text = text.replace(name, "")
  spans = re.findall(r"`([^`\n]+)`", re.sub(BLOCK, "", text, flags=TEXT_BLOCK))
  return sorted({name for span in spans for name in re.findall(r"[A-Za-z_]\w*", span)} - known - OTHERS)

def test_names_in_backticks_are_in_code() -> None:
  # A page names no function, class, field or setting that does not exist.
  assert unknown_names("`attention` of `no_such_function(x)`, `Matrix.no_such_field`") == ["no_such_field", "no_such_function"]
  assert not unknown_names("\n".join(page.read_text() for page in PAGES))

def missing_members(text:str) -> list[str]:
  # Returns the modules and members of the package attn that a text, code blocks included, names but that do not exist.
  def source(module:str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return next((file.read_text() for file in (path.with_suffix(".py"), path/"__init__.py") if file.exists()), "")
  def exists(name:str) -> bool:
    module, _, member = name.rpartition(".")
    return bool(source(name)) or member in re.findall(r"\w+", source(module))
  return sorted({name for name in re.findall(r"(?<![\w/.])attn(?:\.[a-z]\w*)+", text) if not exists(name)})

@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_members_exist(page:Path) -> None:
  assert missing_members("attn.attention attn.isa attn.isa.nothing attn.nothing") == ["attn.isa.nothing", "attn.nothing"]
  assert not missing_members(page.read_text())

def anchors(page:str) -> set[str]:
  # Returns the anchors of a page's headings, as GitHub makes them.
  heads = re.findall(r"^#+ (.*)$", re.sub(BLOCK, "", page, flags=TEXT_BLOCK), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}

def broken_links(page:Path, text:str) -> list[str]:
  # Returns the relative links of a page that lead nowhere.
  def leads_somewhere(link:str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent/name if name else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))
  links = re.findall(r"\]\(([^)\s]+)\)", re.sub(BLOCK, "", text, flags=TEXT_BLOCK))
  return [link for link in links if not re.match(r"https?://", link) and not leads_somewhere(link)]

@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page:Path) -> None:
  assert broken_links(page, "[a](no.md) [b](#no-head) [c](https://x.y) [d](README.md)" if page.parent == ROOT else "[a](no.md) [b](#no-head)") == [
    "no.md", "#no-head"]
  assert not broken_links(page, page.read_text())

def test_the_index_has_every_page() -> None:
  index, about = ((ROOT/"docs"/name).read_text() for name in ("README.md", "data.md"))
  for page in (ROOT/"docs").glob("*.md"): assert page.name == "README.md" or f"]({page.name})" in index, page.name
  described = re.findall(r"data/[\w*]+\.csv", about)
  for path in (ROOT/"docs/data").iterdir(): assert any(path.match(name) for name in described), path.name
