"""Rules of the code base: what `import attn` loads, which modules a module may import, that a name at module level has one meaning, and which
tests run by default."""
from __future__ import annotations
import ast, graphlib, json, os, subprocess, sys
from collections import defaultdict
from pathlib import Path
import pytest
from attn.chips import CHIPS, FAMILIES
from conftest import pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT/"attn").rglob("*.py"))

# ***** one name, one meaning *****

ALLOWED = {"main", "Array"}     # the entry of a module that can be run; a type alias for numpy's array

def defined(tree:ast.Module) -> set[str]:
  # Returns the public names that a module defines, not imports, at module level.
  names = set()
  for node in tree.body:
    if isinstance(node, ast.FunctionDef|ast.ClassDef): names.add(node.name)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
  return {name for name in names if not name.startswith("_")}

def test_a_name_means_one_thing() -> None:
  where = defaultdict(list)
  for path in MODULES:
    for name in defined(ast.parse(path.read_text())): where[name].append(str(path.relative_to(ROOT)))
  assert not {name: paths for name, paths in where.items() if len(paths) > 1 and name not in ALLOWED}

def test_no_module_only_forwards() -> None:
  # Every module except `__init__` of the package defines something, or consists of a docstring only.
  for path in MODULES:
    tree = ast.parse(path.read_text())
    if path == ROOT/"attn/__init__.py" or all(isinstance(node, ast.Expr) for node in tree.body): continue
    defines = any(not isinstance(node, ast.Import|ast.ImportFrom|ast.Expr) for node in tree.body)
    assert defines or path.parent.name == "emulator", path

# ***** which way imports point *****

# Tools that measure, predict, draw and search, and the references, come before the code that computes attention: each room may import only from
# rooms after it. A room may be a single module. The `__main__` of a package is a room of its own.
TOOLS = ("isa.__main__", "pictures.__main__", "tune", "report", "measure", "search", "isa.timing", "isa", "pictures", "accuracy", "reference",
         "extras")
COMPUTES = ("__init__", "flash_attn", "mods", "api", "parallel", "calls", "choose", "compilers", "cache", "kernels", "kernels.amd", "kernels.mma",
            "kernels.wgmma", "kernels.plain", "kernels.nvidia", "kernels.parts.backward", "kernels.parts.grid", "kernels.parts.weights",
            "kernels.parts.memory", "kernels.tiles", "kernels.parts.memory.layouts", "kernels.parts.program", "kernels.parts", "score", "emulator",
            "ops", "chips", "problem", "functions", "values", "tinygrad_compat")
ROOMS = TOOLS + COMPUTES

def module_of(path:Path) -> str: return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

NAMES = {module_of(path) for path in MODULES}

def imports(path:Path) -> set[str]:
  # Returns the modules of attn that a file imports anywhere, also inside functions and for type annotations only.
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      found |= {name if (name := f"{node.module}.{x.name}") in NAMES else node.module for x in node.names}
    elif isinstance(node, ast.Import): found |= {x.name for x in node.names}
  return found & NAMES

def room_of(module:str) -> str:
  # Returns the innermost room of ROOMS that contains a module of attn: a folder or module with its own import rules.
  if module == "attn": return "__init__"
  return max((room for room in ROOMS if f"{module}.".startswith(f"attn.{room}.")), key=len)

def test_imports_point_downwards() -> None:
  for path in MODULES:
    above = ROOMS[:ROOMS.index(room_of(module_of(path)))]
    assert not [x for x in imports(path) if room_of(x) in above and x != "attn"], path

def test_no_circle_of_modules() -> None:
  of = {module_of(path): imports(path) for path in MODULES if path.name != "__init__.py"}
  graphlib.TopologicalSorter({x: {y for y in found if y in of} for x, found in of.items()}).prepare()

def test_few_modules_are_in_no_room() -> None:
  assert len(list((ROOT/"attn").glob("*.py"))) <= 9

def test_no_kernel_imports_another() -> None:
  # No kernel imports another kernel. Code that two kernels share is in attn/kernels/parts.
  for path in (ROOT/"attn/kernels").glob("*.py"):
    assert not [x for x in imports(path) if room_of(x) == "kernels"], path

def test_an_algorithm_knows_no_unit() -> None:
  # forward.py and backward.py, the modules with the algorithms, import no module with the steps of a matrix unit or of plain UOps, directly or
  # indirectly.
  of = {module_of(path): imports(path) for path in MODULES}
  for name in ("forward", "backward"):
    taken = {f"attn.kernels.{name}"}
    while more := set().union(*(of[x] for x in taken)) - taken: taken |= more
    assert not [x for x in taken if x.startswith(("attn.kernels.amd", "attn.kernels.mma", "attn.kernels.wgmma", "attn.kernels.plain"))]

def test_forward_knows_nothing_of_backward() -> None:
  # Modules of forward kernels import no module that is named for gradients, directly or indirectly.
  of = {module_of(path): imports(path) for path in MODULES}
  of_gradients = ("backward", "dbias", "gradient")
  taken = {x for x in of if x.startswith("attn.kernels.") and not x.startswith("attn.kernels.parts.") and not any(word in x for word in of_gradients)}
  while more := set().union(*(of[x] for x in taken)) - taken: taken |= more
  assert not [x for x in taken if any(word in x for word in of_gradients)]

# ***** functions that fit on a screen *****

LONGEST = 60     # lines of a function of a kernel, with its nested functions

def test_functions_fit_on_a_screen() -> None:
  for path in (ROOT/"attn/kernels").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
        assert node.end_lineno - node.lineno + 1 <= LONGEST, f"{path}: {node.name}"

# ***** what `import attn` loads *****

def test_import_loads_no_tools() -> None:
  # `import attn` starts no process. It does not load the reports on machine code, the search for tiles, or modules that only a command needs.
  script = ("import subprocess, sys, json\n"
            "def started(*args, **kwargs): raise AssertionError(f'import attn starts {args}')\n"
            "subprocess.Popen.__init__ = started\n"
            "import attn\n"
            "print(json.dumps(sorted(sys.modules)))")
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
  assert done.returncode == 0, done.stderr
  loaded = set(json.loads(done.stdout))
  assert {"attn.api.attention", "attn.emulator.device"} <= loaded
  tools = {x for x in loaded if x.split(".")[0] in ("rich", "click", "platformdirs", "ziglang", "hypothesis", "matplotlib")}
  assert not tools | {x for x in loaded if x.startswith("attn.") and room_of(x) in TOOLS}

# ***** knowledge of a family of chips *****

def keys_that_are_chips(tree:ast.AST) -> list[str]:
  keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
  return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value in CHIPS]

def family_names_in(tree:ast.AST) -> list[str]:
  return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FAMILIES]

def test_a_family_is_known_in_its_own_file() -> None:
  # Only attn/chips contains names of chip families. There are two exceptions: the emulator, whose own tables of the families come from the vendors'
  # documents, and the names of tinygrad's instruction tables.
  wrong = ast.parse('if arch.family == "rdna4": x = {"cdna3": 1, "gfx950": 2}')
  assert family_names_in(wrong) == ["rdna4", "cdna3"] and keys_that_are_chips(wrong) == ["gfx950"]
  for path in MODULES:
    if path.parent.name in ("chips", "emulator", "tinygrad_compat"): continue
    tree = ast.parse(path.read_text())
    assert not family_names_in(tree) and not keys_that_are_chips(tree), path

# ***** which tests run by default *****

class Case:
  # A stand-in for a collected test case with the marks `marks`.
  def __init__(self, name:str, *marks:pytest.MarkDecorator) -> None:
    self.name, self.nodeid, self.marks = name, f"test_a.py::{name}", list(marks)
  def get_closest_marker(self, name:str) -> pytest.Mark|None: return next((x.mark for x in self.marks if x.name == name), None)
  def add_marker(self, mark:pytest.MarkDecorator) -> None: self.marks.append(mark)

def test_a_sample_of_cases_runs_by_default() -> None:
  # The mark `sample(2)` lets only 2 cases of a test run by default. Cases with other marks, and tests without this mark, stay as they are.
  few = pytest.mark.sample(2)
  ours, other = [Case(f"test_x[{i}]", few) for i in range(5)], [Case(f"test_y[{i}]") for i in range(5)]
  gpu = Case("test_x[gpu]", few, pytest.mark.gpu)
  pytest_collection_modifyitems([*ours, gpu, *other])      # type: ignore[list-item]
  assert [x.get_closest_marker("thorough") is None for x in ours].count(True) == 2
  assert all(x.get_closest_marker("thorough") is None for x in (gpu, *other))
