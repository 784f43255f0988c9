"""The operations of Hopper's warpgroup kernels: CUDA text and numpy meaning side by side, as in attn/intrinsics_cuda.py.

Sections are those of the PTX ISA 8.7. wgmma.mma_async (9.7.15) multiplies for a warpgroup of 128 threads: 64 rows of A, from registers or shared
memory, by up to 256 columns of B from shared memory. A thread's part of the result is that of mma.m16n8k16 for each 8 columns, warp w of the group
having rows 16*w on; so is its part of A.

Tiles in shared memory are panels of 64 columns: rows of 128 bytes whose 16-byte units are permuted by xor with the number of the row modulo 8 (the
128-byte swizzle of 9.7.15.5.1), from an address that is a multiple of 1024 bytes.

What is asynchronous the emulator takes strictly: from `scores` or `output` on until `wait` nobody may touch their accumulators, nor write what they
read, in shared memory or in registers.
"""
from __future__ import annotations
from typing import Any, Callable
import numpy as np
from attn.intrinsics import Array, Intrinsic, Lanes, _any_lane, _exp2, _pack, _xor_lane, express
from attn.intrinsics_cuda import _EX2, LARGE, NOTHING, WARP, _code, _list, _pack_function, first_bias
from attn.tinygrad_compat import UOp, dtypes

GROUP = 128                  # threads of a warpgroup
M, K = 64, 16                # of one instruction
PANEL, ATOM = 128, 1024      # bytes of a row of a panel, and of 8 rows: the pattern of the swizzle

# ***** the meaning *****

def _read(lanes:Lanes, pointer:Any, lines:int, line:Callable[[Array], Array], units:int) -> Array:
  """What each warpgroup reads: `lines` times `units` neighbouring units of 16 bytes, as uint16 (groups, lines, 8*units). `line` gives the byte, from
  the tile's begin on, where a line begins; the swizzle goes by the address."""
  lanes.check_alignment(pointer, ATOM)
  groups = len(lanes.active)//GROUP
  def load(turned:int) -> list[Array]:
    thread, read = (np.arange(len(lanes.active)) + turned) % GROUP, list[Array]()
    for first in range(0, lines*units, GROUP):
      i = np.minimum(first + thread, lines*units - 1)
      at = pointer.offset + line(i//units) + i % units*16
      read.append(lanes.load_bytes(pointer, (at ^ (at//PANEL % 8*16)) - pointer.offset, 16, lanes.active & (first + thread < lines*units)))
    return read
  load(lanes.wave)     # hardware does not say which wave of the group reads what: for the race check another one does, too
  read = load(0)
  bits = np.stack([np.ascontiguousarray(x.T).view(np.uint16).reshape(groups, GROUP, 8) for x in read], 1)
  return bits.reshape(groups, -1, 8)[:, :lines*units].reshape(groups, lines, units*8)

def _rows(lanes:Lanes, pointer:Any, rows:int, steps:int, panel:int) -> Array:
  """`rows` rows of K*steps columns, the contraction along the row: (groups, rows, K*steps)."""
  def line(i:Array) -> Array: return i//steps//8*ATOM + i//steps % 8*PANEL + i % steps//4*panel + i % steps % 4*2*K
  return _read(lanes, pointer, rows*steps, line, 2).reshape(-1, rows, steps*K)

def _columns(lanes:Lanes, pointer:Any, keys:int, width:int, panel:int) -> Array:
  """`keys` rows of `width` columns, the contraction across the rows: (groups, width, keys)."""
  blocks = width//8
  def line(i:Array) -> Array: return i//blocks//8*ATOM + i//blocks % 8*PANEL + i % blocks//8*panel + i % blocks % 8*16
  return _read(lanes, pointer, keys*blocks, line, 1).reshape(-1, keys, width).swapaxes(1, 2)

def _scores(lanes:Lanes, acc:Any, q:Any, k:Any, _:Array, accs:int, steps:int, panels:tuple[int, int], dtype:str) -> Array:
  def of_q() -> Array: return _rows(lanes, q, M, steps, panels[0])
  def of_k() -> Array: return _rows(lanes, k, 8*accs, steps, panels[1])
  return lanes.start_product(acc, accs, of_q, of_k, dtype, False)

def _output(lanes:Lanes, acc:Any, p:Any, v:Any, _:Array, accs:int, steps:int, panel:int, dtype:str) -> Array:
  def fragments() -> Array: return lanes.warpgroup_operand(np.concatenate([lanes.load_register(p, i) for i in range(steps)]))
  def of_v() -> Array: return _columns(lanes, v, K*steps, 8*accs, panel)
  return lanes.start_product(acc, accs, fragments, of_v, dtype, True)

# ***** the text *****

def _accumulators(n:int) -> tuple[str, str]:
  """The registers of n C fragments in $0, within inline assembly and as its operands."""
  return ", ".join(f"%{i}" for i in range(4*n)), ", ".join(f'"+f"($0[{i}].{e})' for i in range(n) for e in "xyzw")

def _descriptor(name:str, pointer:str, apart:int=16) -> str:
  """Matrix descriptor (9.7.15.5.1.2): address, distance of panels where B is transposed, distance of 8 rows, 128-byte swizzle."""
  return (f"unsigned long long {name} = (unsigned long long)(((unsigned)__cvta_generic_to_shared({pointer}) & 0x3ffffu) >> 4) | "
          f"{apart >> 4 << 16 | ATOM >> 4 << 32 | 1 << 62}ull;")

def _assembly(accs:int, descriptors:list[str], lines:list[str], operands:str) -> str:
  """One group of instructions, with the registers and predicates that they need."""
  body = " ".join(["wgmma.fence.sync.aligned;", *lines, "wgmma.commit_group.sync.aligned;"])
  return (f'asm volatile("{{ .reg .pred p; .reg .b64 {", ".join(descriptors)}; {body} }}" : {_accumulators(accs)[1]} : {operands} : "memory"); '
          "return 0.0f;")

def _scores_text(out:Any, accs:int, steps:int, panels:tuple[int, int], dtype:str) -> str:
  lines, c, ptx = [], 4*accs, {"float16": "f16", "bfloat16": "bf16"}[dtype]
  for step in range(steps):
    at = [step//4*panel + step % 4*2*K for panel in panels]
    lines += [f"add.s64 a, %{c}, {at[0] >> 4}; add.s64 b, %{c+1}, {at[1] >> 4}; setp.ne.u32 p, %{c+2}, {step and 2};",
              f"wgmma.mma_async.sync.aligned.m64n{8*accs}k16.f32.{ptx}.{ptx} {{{_accumulators(accs)[0]}}}, a, b, p, 1, 1, 0, 0;"]
  return _code(_descriptor("q_", "$1") + _descriptor("k_", "$2") + _assembly(accs, ["a", "b"], lines, '"l"(q_), "l"(k_), "r"(0)'))

def _output_text(out:Any, accs:int, steps:int, panel:int, dtype:str) -> str:
  lines, c, ptx = [], 4*accs, {"float16": "f16", "bfloat16": "bf16"}[dtype]
  for step in range(steps):
    a = ", ".join(f"%{c + 1 + 4*step + i}" for i in range(4))
    lines += [f"add.s64 b, %{c}, {step*2*ATOM >> 4};",
              f"wgmma.mma_async.sync.aligned.m64n{8*accs}k16.f32.{ptx}.{ptx} {{{_accumulators(accs)[0]}}}, {{{a}}}, b, 1, 1, 1, 1;"]
  p = ", ".join(f'"r"($1[{step}].{e})' for step in range(steps) for e in "xyzw")
  return _code(_descriptor("v_", "$2", panel) + _assembly(accs, ["b"], lines, f'"l"(v_), {p}'))

def _wait_text(out:Any, accs:int) -> str:
  return _code(f'asm volatile("wgmma.wait_group.sync.aligned 0;" : {_accumulators(accs)[1]} :: "memory"); return 0.0f;')

# ***** the online softmax: P from a kept reference, and the rare correction *****

def _correct_text(out:Any, accs:int, scores:int, dtype:str, scale:float, above:float) -> str:
  c = f"{scale!r}f"
  n = " ".join(f"n_.x = fmaxf(n_.x, fmaxf($5[{i}].x, $5[{i}].y)); n_.y = fmaxf(n_.y, fmaxf($5[{i}].z, $5[{i}].w));" for i in range(scores))
  exchange = " ".join(f"n_.{r} = fmaxf(n_.{r}, __shfl_xor_sync({WARP}, n_.{r}, {step}));" for step in (1, 2) for r in "xy")
  rescale = " ".join(f"$3[{i}].{e} *= a_.{r};" for i in range(accs) for e, r in zip("xyzw", "xxyy"))
  bias = f"n_.@ == {NOTHING!r}f ? {first_bias(scale)!r}f : fabsf(n_.@*{c}) <= {LARGE!r}f ? -n_.@*{c} : __int_as_float(0x7fc00000)"
  anew = ""
  for i in range(0, scores, 2):
    for name, j in (("y_", i), ("z_", i + 1)):
      difference = ", ".join(f"ex2_(($5[{j}].{e} - n_.{r})*{c})" for e, r in zip("xyzw", "xxyy"))
      anew += f"float4 {name}{i} = make_float4({difference}); t_.x += {name}{i}.x + {name}{i}.y; t_.y += {name}{i}.z + {name}{i}.w; "
    anew += (f"$4[{i//2}] = make_uint4(pack_(y_{i}.x, y_{i}.y), pack_(y_{i}.z, y_{i}.w), pack_(z_{i}.x, z_{i}.y), pack_(z_{i}.z, z_{i}.w)); ")
  return _code(f"float2 t_ = $6; if (__any_sync({WARP}, !(t_.x <= {2.0**above!r}f) | !(t_.y <= {2.0**above!r}f))) {{ {_EX2} {_pack_function(dtype)} "
               f"float2 o_ = $0[0], n_ = o_; {n} {exchange} float2 a_ = make_float2({_list(f'ex2_((o_.@ - n_.@)*{c})', 2)}); "
               f"$0[0] = n_; $1[0] = make_float2({_list(bias, 2)}); "
               f"$2[0].x *= a_.x; $2[0].y *= a_.y; {rescale} t_ = make_float2(0.0f, 0.0f); {anew} }} $2[0].x += t_.x; $2[0].y += t_.y; return 0.0f;")

def _correct(lanes:Lanes, reference:Any, bias:Any, l:Any, acc:Any, p:Any, s:Any, total:Array, accs:int, scores:int, dtype:str, scale:float,
             above:float) -> Array:
  c = np.float32(scale)
  with np.errstate(invalid="ignore", over="ignore"):
    gate = lanes.active & _any_lane(lanes, np.asarray(~(total <= np.float32(2.0**above)).all(0)), lanes.wave)
    if gate.any():
      old = m = lanes.load_register(reference, 0)
      x = [lanes.load_register(s, i) for i in range(scores)]
      for y in x: m = np.fmax(m, np.fmax(y[0::2], y[1::2]))
      for step in (1, 2): m = np.fmax(m, _xor_lane(lanes, m, step))
      alpha, weights = _exp2((old - m)*c), [_exp2((y - np.repeat(m, 2, 0))*c) for y in x]
      lanes.store_register(reference, 0, m, gate)
      lanes.store_register(bias, 0, np.where(m == np.float32(NOTHING), np.float32(first_bias(scale)),
                                             np.where(np.abs(m*c) <= LARGE, -m*c, np.float32(np.nan))), gate)
      lanes.store_register(l, 0, lanes.load_register(l, 0)*alpha, gate)
      for i in range(accs): lanes.store_register(acc, i, lanes.load_register(acc, i)*np.repeat(alpha, 2, 0), gate)
      for i in range(scores//2): lanes.store_register(p, i, np.concatenate([_pack(weights[2*i + j], dtype) for j in range(2)]), gate)
      total = np.where(gate, sum(y[0::2] + y[1::2] for y in weights), total)
    lanes.store_register(l, 0, lanes.load_register(l, 0) + total, lanes.active)
  return np.zeros(len(lanes.active), np.float32)

TABLE: dict[str, Intrinsic] = {
  # 9.7.13.15: one mbarrier, in whose phases all threads of a block arrive
  "init": Intrinsic(lambda out, threads: _code(f'if ($1) asm volatile("mbarrier.init.shared.b64 [%0], {threads};" :: '
                                               '"r"((unsigned)__cvta_generic_to_shared($0)) : "memory"); return 0.0f;'),
                    lambda lanes, bar, gate, threads: np.zeros(len(lanes.active), np.float32)),
  "arrive": Intrinsic(_code('unsigned b_ = (unsigned)__cvta_generic_to_shared($0); '
                            'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(b_) : "memory"); return 0.0f;'),
                      lambda lanes, bar, _: lanes.arrive()),
  "arrived": Intrinsic(_code('unsigned b_ = (unsigned)__cvta_generic_to_shared($0), ok_ = 0u; while (!ok_) asm volatile("{ .reg .pred p; '
                             'mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok_) : "r"(b_), "r"($1) : "memory"); '
                             'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); return 0.0f;'),
                       lambda lanes, bar, parity, _: lanes.await_arrivals(parity)),
  "scores": Intrinsic(_scores_text, _scores),
  "output": Intrinsic(_output_text, _output),
  "wait": Intrinsic(_wait_text, lambda lanes, *_, accs: lanes.wait_products()),
  "correct": Intrinsic(_correct_text, _correct),
  "group": Intrinsic(f"__shfl_sync({WARP}, {{0}}, 0)", lambda lanes, x: x),
}

def init(barrier:UOp, first:UOp, threads:int) -> UOp:
  """Makes 8 bytes of shared memory (an INDEX) an mbarrier for so many threads; done by the thread for which `first` holds. A statement, after which a
  block barrier must follow."""
  return express(TABLE["init"], dtypes.float, barrier, first, threads=threads)
def arrive(barrier:UOp, order:UOp) -> UOp:
  """This thread arrives at the mbarrier's next phase when the copies that it has started are there. A statement."""
  return express(TABLE["arrive"], dtypes.float, barrier, order)
def arrived(barrier:UOp, phase:UOp, order:UOp) -> UOp:
  """Waits until all threads have arrived at phase number `phase`, so that wgmma may read what they copied. A statement."""
  return express(TABLE["arrived"], dtypes.float, barrier, (phase % 2).cast(dtypes.int), order)
def scores(acc:UOp, q:UOp, k:UOp, order:UOp, steps:int, panels:tuple[int, int], dtype:str) -> UOp:
  """Starts acc = Q K^T: 64 rows of Q and 8 rows of K for each C fragment in `acc` (a placeholder), 16*steps columns of both, from INDEXes of their
  first units; `panels` are the distances of Q's panels and of K's, in bytes. A statement."""
  return express(TABLE["scores"], dtypes.float, acc[0], q, k, order, accs=acc.max_numel(), steps=steps, panels=panels, dtype=dtype)
def output(acc:UOp, p:UOp, v:UOp, order:UOp, panel:int, dtype:str) -> UOp:
  """Starts acc += P V: A fragments `p` (a placeholder, 16 keys each), as many rows of V. A statement."""
  return express(TABLE["output"], dtypes.float, acc[0], p[0], v, order, accs=acc.max_numel(), steps=p.max_numel(), panel=panel, dtype=dtype)
def wait(acc:UOp, order:UOp) -> UOp:
  """All that was started is done: `acc` may be used. A statement."""
  return express(TABLE["wait"], dtypes.float, acc[0], order, accs=acc.max_numel())
def correct(reference:UOp, bias:UOp, l:UOp, acc:UOp, p:UOp, s:UOp, total:UOp, dtype:str, scale:float, above:float) -> UOp:
  """l += total, the sums of this trip's P; but where in any lane of the warp one of them is not at most 2^above, P was taken from a reference that
  the scores `s` have outgrown (P >= 0: a small sum proves that all of P is small). Then the references become the maxima of their rows, l and acc
  are scaled to them, and P and its sums are computed anew, from differences: exact for scores of any size. Where a bias would be LARGE it is NaN, and
  every trip comes here, as with a NaN among the scores. A statement; its register operands are placeholders."""
  return express(TABLE["correct"], dtypes.float, *[x[0] for x in (reference, bias, l, acc, p, s)], total, accs=acc.max_numel(), scores=s.max_numel(),
                 dtype=dtype, scale=scale, above=above)
def group(wave:UOp) -> UOp:
  """The number of this thread's warpgroup, told to the compiler to be the same in the warp."""
  return express(TABLE["group"], dtypes.int, (wave//4).cast(dtypes.int))
