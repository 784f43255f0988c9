"""Rows of K and V that are stored in 8 bits, with a scale for each row: conversion of the numbers to 16 bits, and use of the scales."""
from __future__ import annotations
from typing import Any
from attn.ops.common import length, u32
from attn.ops.eight_bits import bytes_of, numbers
from attn.ops.language import compound, instruction
from attn.ops.numerics import pack_pairs
from attn.ops.operation import Array, Body, Value, emit
from attn.ops.softmax import in_range
from attn.tinygrad_compat import UOp, dtypes

# ***** scales of V *****

@compound("scale_in_range")
def _scale_in_range(c:Any, x:Value) -> Value: return in_range(c, x)

@compound("zero_or_nan")
def _zero_or_nan(c:Any, x:Value) -> Value: return x*0.0

def scale_in_range(x:UOp) -> UOp:
  """Returns the scales `x` of rows of V. Scales that are too small, too large, zero or NaN are replaced, so that P can be divided by every scale."""
  # At least 2^-100. A scale that is not positive, is NaN, or is above 2^122 becomes OF_NO_ROW, which is 2^-40: a row of zeros has the scale 0, and
  # in place of the scale of a missing row memory may hold any number.
  return emit("scale_in_range", x.dtype, x)
def zero_or_nan(x:UOp) -> UOp:
  """Returns NaN for each scale in `x` that is NaN, otherwise 0."""
  return emit("zero_or_nan", x.dtype, x)

# ***** numbers of 8 bits *****

def _widen_all(lanes:Any, words:Array, kind:str, dtype:str, in_order:bool) -> Array: return pack_pairs(numbers(bytes_of(words), kind), dtype)

def _widen_pair(lanes:Any, word:Array, places:tuple[int, int], kind:str, dtype:str) -> Array:
  return pack_pairs(numbers(bytes_of(word)[list(places)], kind), dtype)[0]

# int8 to fp16: the byte x + 128 becomes the low half of the fp16 number 1024 + 128 + x, from which 1152 is subtracted.

def _widen_all_hip(printer:Any, out:str, kind:str, dtype:str, in_order:bool) -> Body:
  if kind != "int8":     # v_cvt_pk_f32_fp8, which converts the chip's own format; 16 bits hold each of its numbers
    lines = [f"auto x{i} = __builtin_amdgcn_cvt_pk_f32_fp8((int)words[{i//2}], {'true' if i%2 else 'false'});" for i in range(4)]
    pairs = [f"__builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(x{i}[0], x{i}[1]))" if dtype == "float16" else
             f"pair_of(x{i}[1], x{i}[0])" for i in range(4)]
    printer.declare("pair_of(float, float)", f"{printer.header}unsigned pair_of(float high, float low) {{\n"
                    "  return __builtin_amdgcn_perm(__builtin_bit_cast(unsigned, high), __builtin_bit_cast(unsigned, low), 0x07060302u);\n}")
  elif dtype == "float16":
    lines = [f"unsigned x{i} = words[{i}] ^ 0x80808080u;" for i in range(2)]
    halves = [f"__builtin_amdgcn_perm(0x64646464u, x{i//2}, 0x{(0x04010400, 0x04030402)[i%2]:08x}u)" for i in range(4)]
    pairs = [f"__builtin_bit_cast(unsigned, __builtin_bit_cast(half2, {x}) - (half2)((_Float16)1152.0f))" for x in halves]
  else:
    lines = [f"unsigned x{i} = __builtin_bit_cast(unsigned, (float)(signed char)(words[{i//4}] >> {i%4*8}));" for i in range(8)]
    pairs = [f"__builtin_amdgcn_perm(x{i + 1}, x{i}, 0x07060302u)" for i in range(0, 8, 2)]
  lines.append(f"uint4 wide = (uint4){{{', '.join(pairs)}}};")
  if in_order: lines = ['asm volatile("" : "+v"(words));', *lines, 'asm volatile("" :: "v"(wide));']
  return Body("\n".join([*lines, "return wide;"]), "words", name=f"widen_{kind}_{dtype}" + "_in_order"*in_order)

def _widen_pair_cuda(printer:Any, out:str, places:tuple[int, int], kind:str, dtype:str) -> Body:
  # a constant comes first in __byte_perm: ptxas would copy the selector to a register for each pair if the constant came second
  def beside(constant:str, word:str) -> str: return f"__byte_perm({constant}, {word}, 0x0{places[1] + 4}0{places[0] + 4}u)"
  if kind != "int8":
    pair = {(0, 1): "word", (2, 3): "word >> 16"}.get(places, f"__byte_perm(word, 0u, 0x44{places[1]}{places[0]}u)")
    lines = ["unsigned y;", f'asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((unsigned short)({pair})));']
    if dtype == "bfloat16":
      lines.append('asm("{\\n.reg .b16 low, high;\\n.reg .f32 a, b;\\nmov.b32 {low, high}, %0;\\ncvt.f32.f16 a, low;\\ncvt.f32.f16 b, high;\\n"\n'
                   '    "cvt.rn.bf16x2.f32 %0, b, a;\\n}" : "+r"(y));')
  elif dtype == "float16": lines = [f"unsigned y, x = {beside('0x64646464u', 'word ^ 0x80808080u')};",
                                  'asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0x64806480u));']
  # int8 to bf16: 128 + the low seven bits, and then -128 or, for a negative number, -256
  else: lines = [f"unsigned y, x = {beside('0x43434343u', 'word & 0x7f7f7f7fu')}, z = {beside('0xc3c3c3c3u', 'word & 0x80808080u')};",
                 'asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3f803f80u), "r"(z));']
  return Body("\n".join([*lines, "return y;"]), "word", name=f"widen_{kind}_{dtype}_{places[0]}{places[1]}")

instruction("widen_all", _widen_all, _widen_all_hip)
instruction("widen_pair", _widen_pair, cuda=_widen_pair_cuda)

def widen_all(words:UOp, kind:str, dtype:str, in_order:bool=False) -> UOp:
  """Returns eight 8-bit numbers of the format `kind` (2 dwords), converted to the 16-bit type `dtype` (4 dwords)."""
  # With `in_order` the compiler makes one conversion after another: fewer registers then hold numbers that are half converted. No conversion has an
  # error.
  return emit("widen_all", u32(2*length(words)), words, kind=kind, dtype=dtype, in_order=in_order)
def widen_pair(word:UOp, places:tuple[int, int], kind:str, dtype:str) -> UOp:
  """Returns bytes places[0] and places[1] of a dword, numbers of the 8-bit format `kind`, converted to a pair of 16-bit `dtype`."""
  return emit("widen_pair", dtypes.uint, word, places=places, kind=kind, dtype=dtype)
