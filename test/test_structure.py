"""The house: what `import attn` loads, which way imports point, and that a name at module level means one thing."""
from __future__ import annotations
import ast, json, os, subprocess, sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT/"attn").rglob("*.py"))

# ***** one name, one meaning *****

ALLOWED = {"main", "Array"}     # what a module that is run begins with; numpy's array as a type
# What two vendors, or two kernels, still have in common. A name leaves this list when one of its meanings goes.
STILL_TWICE = {
  "Extent", "Layout", "NEG_INF", "Rows", "State", "UNIT", "barrier", "lds_bytes", "wait",                # kernels, and the operations of two vendors
  "Block", "Instruction", "LANE", "LONGEST", "ONES", "Registers", "UNDER_WAY", "Value", "WIDTH", "literal", "register", "text_of", "widen",
  "EMPTY", "OURS", "choose", "loaded", "probe"}

def defined(tree:ast.Module) -> set[str]:
  """What a module defines itself at module level, not what it imports, nor what is its own business (`_names`)."""
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
  twice = {name: paths for name, paths in where.items() if len(paths) > 1 and name not in ALLOWED}
  assert not {name: paths for name, paths in twice.items() if name not in STILL_TWICE}

def test_no_module_only_forwards() -> None:
  """Every module but the package's own defines something, or is a room's sign: a docstring."""
  for path in MODULES:
    tree = ast.parse(path.read_text())
    if path == ROOT/"attn/__init__.py" or all(isinstance(node, ast.Expr) for node in tree.body): continue
    defines = any(not isinstance(node, ast.Import|ast.ImportFrom|ast.Expr) for node in tree.body)
    assert defines or path.parent.name == "emulator", path

# ***** which way imports point *****

ROOMS = ("api", "choose", "kernels")     # each may import from those after it

def imports(path:Path) -> set[str]:
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module: found |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
    elif isinstance(node, ast.Import): found |= {x.name for x in node.names}
  return found

def test_imports_point_downwards() -> None:
  for i, room in enumerate(ROOMS):
    for path in (ROOT/"attn"/room).glob("*.py"):
      for above in ROOMS[:i]:
        assert not [x for x in imports(path) if x.split(".")[:2] == ["attn", above]], path

# ***** what `import attn` loads *****

def test_import_loads_no_tools() -> None:
  """Neither the reports on machine code, nor the search for a compiler, nor what only a command needs; and it starts no process."""
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
  tools |= {x for x in loaded if x.startswith("attn.isa.")} - {"attn.isa.compiler"}       # the compiler that tinygrad is offered
  assert not tools | (loaded & {"attn.tune", "attn.choose.search", "attn.reference"})
