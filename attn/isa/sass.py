"""Compiles CUDA source to SASS, the machine code of NVIDIA's chips, with nvcc and cuobjdump or nvdisasm of a CUDA toolkit."""
from __future__ import annotations
import os, shutil, subprocess, tempfile
from collections.abc import Iterable
from pathlib import Path
from attn.tinygrad_compat import CompileError

DISASSEMBLERS = {"cuobjdump": ("-sass",), "nvdisasm": ("-c",)}

def toolkit_program(*names:str, also:Iterable[str]=()) -> str|None:
  """Returns the path of the first program of `names` on PATH, in a folder of a CUDA toolkit, or in the folders `also`."""
  # the folders of a toolkit: bin in CUDA_HOME and in CUDA_PATH, the folder of nvcc, and /usr/local/cuda/bin
  nvcc = shutil.which("nvcc")
  homes = [Path(os.environ[x])/"bin" for x in ("CUDA_HOME", "CUDA_PATH") if x in os.environ]
  homes += [Path(nvcc).resolve().parent] if nvcc is not None else []
  where = os.pathsep.join([os.environ.get("PATH", ""), *map(str, homes), "/usr/local/cuda/bin", *also])
  return next((found for name in names if (found := shutil.which(name, path=where)) is not None), None)

def missing() -> str|None:
  """Returns a sentence that names the programs which SASS needs and which are not installed, or None if all are installed."""
  lacking = [words for names, words in ((("nvcc",), "nvcc"), (DISASSEMBLERS, "cuobjdump or nvdisasm")) if toolkit_program(*names) is None]
  return f"no {' and no '.join(lacking)} on PATH, in CUDA_HOME or in /usr/local/cuda: SASS needs a CUDA toolkit" if lacking else None

def _run(*command:str) -> str:
  done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
  if done.returncode != 0: raise CompileError(f"{Path(command[0]).name} failed:\n{done.stderr.strip() or done.stdout.strip()}")
  return done.stdout

def sass(source:str, arch:str) -> str:
  """Compiles a CUDA source for `arch`, such as "sm_90", and returns the text of the SASS. Raises CompileError with the compiler's message."""
  if (words := missing()) is not None: raise RuntimeError(words)
  nvcc, disassembler = toolkit_program("nvcc"), toolkit_program(*DISASSEMBLERS)
  assert nvcc is not None and disassembler is not None
  # sm_90 has no wgmma, sm_90a has
  target = "90a" if arch == "sm_90" else arch.removeprefix("sm_")
  with tempfile.TemporaryDirectory() as folder:
    text, cubin = os.path.join(folder, "kernel.cu"), os.path.join(folder, "kernel.cubin")
    Path(text).write_text(source)
    _run(nvcc, f"-gencode=arch=compute_{target},code=sm_{target}", "-cubin", "-o", cubin, text)
    return _run(disassembler, *DISASSEMBLERS[Path(disassembler).stem], cubin)
