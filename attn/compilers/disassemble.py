"""Disassembles code objects (ELF) in Python: kernels of other projects, or kernels whose assembly text is lost. Begin with `disassemble`."""
from __future__ import annotations
import struct
from typing import Any
from collections.abc import Iterator
from attn.chips import CHIPS, Chip
from attn.tinygrad_compat import decode_instruction, elf_loader

# tinygrad's tables of AMD's instruction sets decode the instructions. The text begins with the kernels' metadata, such as their numbers of
# registers. The code follows in the form that `llvm-objdump -d` prints and `parse.parse` reads. Operands are written in tinygrad's form, which an
# assembler does not accept.

MACHINES = {chip.machine: chip for chip in CHIPS.values() if chip.machine}   # key: the low byte of e_flags
LONGEST_INSTRUCTION = 24   # bytes of the longest instruction

def elf_chip(lib:bytes) -> Chip:
  """Returns the chip for which the ELF `lib` was linked. Raises ValueError for anything but an ELF of a known AMD GPU."""
  if lib[:4] != b"\x7fELF": raise ValueError("not an ELF: a bundle of code objects has to be unpacked first (clang-offload-bundler)")
  machine, flags = struct.unpack_from("<H", lib, 18)[0], struct.unpack_from("<I", lib, 48)[0]
  if machine != 0xe0: raise ValueError(f"an ELF of machine {machine:#x}, not of an AMD GPU")
  if (chip:=MACHINES.get(flags & 0xff)) is None: raise ValueError(f"a code object of an AMD chip that attn does not know (e_flags {flags:#x})")
  return chip

# ***** metadata *****

def _decode(data:bytes, at:int) -> tuple[Any, int]:
  """Decodes one MessagePack value at position `at`. Returns the value and the position of the next value."""
  # github.com/msgpack/msgpack/blob/master/spec.md: the kinds of values that AMDGPU metadata contains
  tag = data[at]
  at += 1
  def number(fmt:str) -> tuple[int, int]: return struct.unpack_from(fmt, data, at)[0], at + struct.calcsize(fmt)
  if tag <= 0x7f: return tag, at
  if tag >= 0xe0: return tag - 256, at
  if tag in (0xc0, 0xc2, 0xc3): return {0xc0: None, 0xc2: False, 0xc3: True}[tag], at
  if 0xcc <= tag <= 0xd3: return number(">" + "BHIQbhiq"[tag - 0xcc])
  if 0x80 <= tag <= 0x8f or tag in (0xde, 0xdf):
    n, at = (tag & 15, at) if tag <= 0x8f else number(">H" if tag == 0xde else ">I")
    pairs = {}
    for _ in range(n):
      key, at = _decode(data, at)
      pairs[key], at = _decode(data, at)
    return pairs, at
  if 0x90 <= tag <= 0x9f or tag in (0xdc, 0xdd):
    n, at = (tag & 15, at) if tag <= 0x9f else number(">H" if tag == 0xdc else ">I")
    items = []
    for _ in range(n):
      item, at = _decode(data, at)
      items.append(item)
    return items, at
  if 0xa0 <= tag <= 0xbf or tag in (0xd9, 0xda, 0xdb):
    n, at = (tag & 31, at) if tag <= 0xbf else number({0xd9: ">B", 0xda: ">H", 0xdb: ">I"}[tag])
    return data[at:at + n].decode("utf-8", "replace"), at + n
  raise ValueError(f"unexpected MessagePack tag {tag:#x}")

def elf_metadata(lib:bytes) -> list[dict[str, Any]]:
  """Returns a dictionary for each kernel in the code object `lib`, with the kernel's name, number of registers and other properties."""
  for section in elf_loader(lib)[1]:
    data, at = section.content, 0
    while section.name == ".note" and at + 12 <= len(data):
      name_size, size, kind = struct.unpack_from("<III", data, at)
      at += 12 + -(-name_size//4)*4
      # NT_AMDGPU_METADATA, with the list amdhsa.kernels (LLVM, AMDGPUUsage: "Code Object Metadata")
      if kind == 32: return list(_decode(data, at)[0]["amdhsa.kernels"])
      at += -(-size//4)*4
  return []

def symbols(lib:bytes, section:str) -> list[tuple[str, int, bytes]]:
  """Returns (name, address, contents) of the symbols in a section of the code object `lib`."""
  sections = elf_loader(lib)[1]
  by_name = {s.name: s for s in sections}
  table, names = (by_name[n].content for n in ((".symtab", ".strtab") if ".symtab" in by_name else (".dynsym", ".dynstr")))
  all_of_it, base = by_name[section].content, by_name[section].header.sh_addr
  named = [(names[name:names.index(b"\0", name)].decode(), sections[index].name, value, size)
           for name, _, _, index, value, size in struct.iter_unpack("<IBBHQQ", table) if index < len(sections)]
  kernels = {name.removesuffix(".kd") for name, *_ in named if name.endswith(".kd")}
  mine = [(name, value, size) for name, where, value, size in named if where == section and (size or name in kernels)]
  # kernels written by hand may have no size: such a kernel extends to the next symbol or to the end of the section
  after = sorted({value for _, value, _ in mine} | {base + len(all_of_it)})
  ends = {value: after[after.index(value) + 1] for _, value, _ in mine if value != after[-1]}
  return [(name, value, all_of_it[value - base:(value + size if size else ends[value]) - base]) for name, value, size in mine]

def metadata_text(lib:bytes, chip:Chip) -> str:
  """Returns the numbers in the metadata of all kernels in the code object `lib`, in the form of clang's assembly text."""
  descriptors = {name: contents for name, _, contents in symbols(lib, ".rodata")}
  lines = [f"amdhsa.target: amdgcn-amd-amdhsa--{chip.name}", "amdhsa.kernels:"]
  for kernel in elf_metadata(lib):
    lines += [f"  - .symbol: {kernel['.symbol']}", *(f"    {k}: {int(v)}" for k, v in kernel.items() if isinstance(v, int))]
    # AMDGPUUsage, "Kernel Descriptor": bits 5:0 of compute_pgm_rsrc3 on gfx90a to gfx950 are the first AGPR, in units of 4, minus 1
    if chip.unit.agprs: lines.append(f"    .accum_offset: {4*((struct.unpack_from('<I', descriptors[kernel['.symbol']], 44)[0] & 63) + 1)}")
  return "\n".join(lines) + "\n"

# ***** code *****

def _text(ins:Any) -> str:
  operands = str(ins).partition("(")[2].removesuffix(")")
  if hasattr(ins, "opx"): return f"v_dual_{_name(ins.opx)} {operands} :: v_dual_{_name(ins.opy)}"
  if not operands and ins.op_name.lower().startswith("s_wait"): operands = "0"      # tinygrad omits a number that is 0
  return f"{ins.op_name.lower()} {operands}" + (" lds" if getattr(ins, "lds", 0) else "")

def _name(op:Any) -> str: return op.name.lower().removeprefix("v_dual_").removeprefix("v_")

def _instructions(code:bytes, address:int, chip:Chip) -> Iterator[str]:
  at = 0
  while at < len(code):
    word = int.from_bytes(code[at:at + 4], "little")
    try: ins = decode_instruction(code[at:at + LONGEST_INSTRUCTION], chip.unit.tables)
    except ValueError: raise ValueError(f"cannot decode the instruction {word:08x} at {address + at:#x} for {chip.name}: "
                                        "llvm-objdump -d of ROCm may be able to; pass its output instead") from None
    # the offset of a branch is in dwords from the next instruction on; llvm-objdump prints it unchanged
    text = _text(ins)
    yield f"\t{text.split()[0]} {word & 0xffff}" + f" // {address + at:012X}: {word:08X}" if text.startswith(("s_branch", "s_cbranch")) else \
          f"\t{text} // {address + at:012X}: {word:08X}"
    at += ins.size()

def disassemble(lib:bytes) -> str:
  """Returns the metadata and the functions of the code object `lib` as text."""
  chip = elf_chip(lib)
  if not chip.unit.tables:
    raise ValueError(f"a code object of {chip}: there are no tables to decode it by. Pass the output of `llvm-objdump -d` of ROCm instead")
  parts = [metadata_text(lib, chip)]
  for name, address, code in symbols(lib, ".text"): parts += [f"\n{address:016x} <{name}>:", *_instructions(code, address, chip)]
  return "\n".join(parts) + "\n"
