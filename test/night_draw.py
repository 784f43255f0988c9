"""Random calls of attention. A seed determines a call completely, with every input number. A call is a script, which night.py runs and a person can
paste."""
from __future__ import annotations
import itertools, random
from dataclasses import dataclass, field
from typing import Any
from attn.accuracy import ShortSums
from attn.chips import get_chip
from attn.emulator.chips import SHORT_SUMS
from guarded import SIDES
from night_oracle import Facts

CHIPS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1030", "gfx1010", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
FLUSHING = ("gfx90a",)                                                    # chips whose matrix unit takes numbers below the normal range for zero
MACHINE = {"CPU": "CPU", "CL": "CL", "CUDA": "CUDA"}                      # real devices, not emulated chips
AXES = {"bhsd": "bhsd", "bshd": "bshd", "nsd": "hsd", "thd": "shd"}       # axes of each layout: b batch, h heads, s rows, d width
COUNTS = (2, 3, 4, 5, 8)                                                  # numbers of devices
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64, 65, 70, 100, 127, 128, 129, 150, 200, 257, 300)
WORK = {"tiled": 2e6, "": 1.2e7}                                          # products of a call, at most: without and with a matrix unit

def longest(ends:list[int]) -> int:
  # Returns the number of rows of the longest packed sequence, at least 1.
  return max(1, *(after - before for before, after in itertools.pairwise(ends)))

@dataclass(frozen=True)
class Call:
  seed: int
  on: str
  direction: str
  kind: str
  script: str
  facts: Facts

@dataclass
class DrawnCall:
  # A random call of attention while it is being drawn: the parts of a script whose function `step` makes the call.
  # Four fields hold lines of the script. `arrays`: the inputs as numpy arrays (B, H, S, D), by name. `outside`: the arguments of `step`, tensors made
  # from these arrays. `inside`: the lines of `step`; the first make views of its arguments. `restored`: how to bring each result to the shape of its
  # expected values.
  rng: random.Random
  on: str
  backward: bool
  kind: str = ""
  dtype: str = "float16"
  out_dtype: str = "float16"
  layout: str = "bhsd"
  B: int = 1
  H: int = 1
  Hkv: int = 1
  Sq: int = 1
  Sk: int = 1
  D: int = 8
  Dv: int = 8
  turns: int = 1
  jit: bool = False
  options: dict[str, str] = field(default_factory=dict)
  facts: dict[str, Any] = field(default_factory=dict)
  types: dict[str, str] = field(default_factory=dict)
  settings: dict[str, Any] = field(default_factory=dict)
  arrays: dict[str, str] = field(default_factory=dict)
  outside: dict[str, str] = field(default_factory=dict)
  before: list[str] = field(default_factory=list)       # lines that run once, before all turns
  each: list[str] = field(default_factory=list)         # lines that run in each turn before its tensors are made
  inside: list[str] = field(default_factory=list)
  after: list[str] = field(default_factory=list)        # lines that run in each turn after the results exist
  restored: dict[str, str] = field(default_factory=dict)
  wanted: tuple[str, ...] = ()
  device_count: int = 1

  # ***** random sizes *****

  def chance(self, p:float) -> bool: return self.rng.random() < p
  def one(self, *of:Any) -> Any: return self.rng.choice(of)
  @property
  def device(self) -> str: return MACHINE.get(self.on, "EMU")
  @property
  def devices(self) -> tuple[str, ...]: return tuple(f"{self.device}:{i}" for i in range(self.device_count))
  @property
  def plain_uops(self) -> bool: return self.on in MACHINE or self.on in ("gfx1030", "gfx1010") or self.dtype == "float32"
  def width(self) -> int:
    at = self.rng.random()
    if at < .5: return 8*self.rng.randint(1, 8)
    if at < .75: return self.rng.randint(1, 64)
    if at < .9: return self.rng.randint(65, 128)
    return self.rng.randint(129, 256) if at < .98 else self.rng.randint(257, 512)
  def length(self) -> int: return self.one(*LENGTHS)

  def sizes(self) -> None:
    self.dtype = self.one("float16", "float16", "float16", "bfloat16", "bfloat16", "float32")
    self.out_dtype = self.dtype if self.chance(.75) else self.one("float16", "bfloat16", "float32")
    self.B, self.Hkv = self.one(1, 1, 2, 3), self.one(1, 1, 2, 3)
    self.H = self.Hkv*self.one(1, 1, 1, 2, 3, 4, 8)
    self.Sq, self.Sk, self.D = self.length(), self.length(), self.width()
    if self.chance(.3): self.Sq = self.Sk
    self.Dv = self.D if self.chance(.75) else self.width()

  def held_to_work(self) -> None:
    # Makes the drawn problem smaller until the call needs at most about a second.
    most = WORK["tiled" if self.plain_uops and self.on not in MACHINE else ""]/(2.5 if self.backward else 1)
    def work() -> int: return self.B*self.H*(self.Sq + 32)*(self.Sk + 32)*(self.D + self.Dv)
    # First the longer sequence is halved, and then the head dimensions.
    while work() > most and (longest := max(self.Sq, self.Sk)) > 8: self.Sq, self.Sk = (-(-n//2) if n == longest else n for n in (self.Sq, self.Sk))
    while work() > most and max(self.D, self.Dv) > 16: self.D, self.Dv = -(-self.D//2), -(-self.Dv//2)

  # ***** inputs *****

  def values(self, name:str, kind:str, shape:tuple[int, ...]|str, dtype:str, same:int|None=None) -> None:
    # Adds an input to the drawn call: random numbers of a kind that the function `values` of night_script.py knows.
    # With `same`, all slices along that axis are equal. Each call of a TinyJit gets other numbers.
    seed = f"{self.rng.randrange(10**6)}" + (" + turn" if self.turns > 1 else "")
    self.arrays[name] = f"values({kind!r}, {shape}, {dtype!r}, {seed}{f', same={same}' if same is not None else ''})"

  def profile(self) -> dict[str, str]:
    # Chooses at random which kinds of numbers q, k and v have, such as "large" or "nan".
    hard = [{"q": "positive", "k": "rising"}, {"q": "positive", "k": "falling"}, {"q": "large"}, {"k": "large"}, {"v": "large"}, {"k": "huge"},
            {"q": "constant", "k": "constant"}, {"k": "zero"}, {"q": "small", "v": "small"}, {"v": "constant"}]
    # v never has NaN or inf, because these would spread to other rows if the problem has a mask (docs/attention.md).
    odd = [{"q": "nan"}, *([] if self.facts.get("v_dim") else [{"k": "nan"}, {"q": "positive", "k": "-inf"}, {"q": "positive", "k": "inf"}])]
    if self.chance(.6): return {}
    return self.one(*odd) if self.chance(.15) and not self.backward else self.one(*hard)

  def inputs(self, may_be_same:bool=False, kinds:dict[str, str]|None=None) -> None:
    # Adds q, k and v, with numbers of the kinds `kinds`, to the drawn call.
    if kinds is None: kinds = self.profile()
    shapes = {"q": (self.B, self.H, self.Sq, self.D), "k": (self.B, self.Hkv, self.Sk, self.D), "v": (self.B, self.Hkv, self.Sk, self.Dv)}
    # In some draws all batches, or all heads, of k and v are equal, and k and v become views of one batch or head.
    same = self.one(0, 1) if may_be_same and self.chance(.08) else None
    for name, shape in shapes.items():
      if name == "v" and self.facts.get("v_dim"): self.arrays["v"] = f"x['k'][..., :{self.facts['v_dim']}]"
      else: self.values(name, kinds.get(name, "normal"), shape, self.dtype, same if name != "q" else None)
    if same is not None: self.settings["same"] = same

  def far_reaching(self) -> dict[str, str]:
    # Chooses at random an input that gets a row of NaN or inf which affects other rows; returns {input: "nan", "inf" or "-inf"}.
    # In forward the input is v, whose row affects all queries that see it.
    return {self.one("q", "k", "v"): "nan"} if self.backward else {"v": self.one("nan", "inf", "-inf")}

  def ndim(self, layout:str="") -> int: return len(AXES[layout or self.layout])

  def steps(self, name:str, shape:tuple[int, ...], dtype:str) -> list[tuple[Any, ...]]:
    # Returns random movement operations that make a view of this shape from a larger tensor.
    # The last operation is drawn first, because each is drawn from the shape that it must produce.
    found: list[tuple[Any, ...]] = []
    if (same := self.settings.get("same")) is not None and name in "kv" and self.layout == "bhsd":
      found.append(("expand", same, shape[same]))
      shape = tuple(1 if i == same else n for i, n in enumerate(shape))
    for _ in range(self.one(0, 0, 0, 1, 1, 2, 3)):
      axis = self.rng.randrange(len(shape))
      match self.one("permute", "flip", "shrink", "stride", "reshape", "computed", "cast"):
        case "permute":
          axes = self.rng.sample(range(len(shape)), len(shape))
          found.append(("permute", *axes))
          shape = tuple(shape[axes.index(i)] for i in range(len(shape)))
        case "flip": found.append(("flip", axis))
        case "shrink":
          some = self.rng.randint(0, 3), self.rng.randint(0, 3)
          found.append(("shrink", axis, *some))
          shape = tuple(n + sum(some) if i == axis else n for i, n in enumerate(shape))
        case "stride":
          found.append(("stride", axis, n := self.one(2, 3)))
          shape = tuple(size*n if i == axis else size for i, size in enumerate(shape))
        case "reshape" if len(shape) > 1:
          flat = (*shape[:-2], shape[-2]*shape[-1])
          found.append(("reshape", flat, shape))
          shape = flat
        case "computed": found.append(("computed",))
        case "cast": found.append(("cast", dtype))
    return found[::-1]

  def shape_in(self, layout:str, h:int, s:int, d:int) -> tuple[int, ...]:
    sizes = {"b": self.B, "h": self.B*h if layout == "nsd" else h, "s": s, "d": d}
    return tuple(sizes[axis] for axis in AXES[layout])

  def place(self, name:str, text:str, dtype:str, shape:tuple[int, ...], views:bool=True, after:str="") -> None:
    # Adds a tensor to the drawn script, from the code `text` of its array.
    # With `views`, the tensor may become a view of a larger one. `after` is code that follows the tensor before the call gets it, for example to
    # divide it over devices.
    steps = ", ".join(map(repr, self.steps(name, shape, dtype))) if views else ""
    realized = ".realize()" if self.jit or self.chance(.3) else ""
    made = f"tensor(base({text}, {steps}), {dtype!r}, {self.device!r})" if steps else f"tensor({text}, {dtype!r}, {self.device!r})"
    if not steps: self.outside[name] = f"{made}{after}{realized}"
    elif after: self.outside[name] = f"view({made}.realize(), {steps}){after}{realized}"    # tinygrad would not shard a permuted tensor
    else:
      self.outside[name] = made + realized
      self.inside.append(f"{name} = view({name}, {steps})")

  def tensor(self, text:str) -> str:
    # Returns the code of a realized tensor of the problem's dtype, from the code `text` of its array.
    return f"tensor({text}, {self.dtype!r}, {self.device!r}).realize()"

  def three(self, views:bool=True) -> None:
    # Adds the code that makes q, k and v in the drawn layout; with `views`, they may become views of larger tensors.
    for name, h, s, d in (("q", self.H, self.Sq, self.D), ("k", self.Hkv, self.Sk, self.D), ("v", self.Hkv, self.Sk, self.Dv)):
      if name == "v" and self.facts.get("v_dim"): continue
      self.place(name, f"arrange(x[{name!r}], {self.layout!r})", self.dtype, self.shape_in(self.layout, h, s, d), views)

  # ***** options *****

  def masks(self) -> None:
    causal = self.one("True", "True", "'bottom-right'", "'top-left'") if self.chance(.5) else ""
    left, right = -1, -1
    if self.chance(.25): left = self.rng.randint(0, max(self.Sk, 2))
    if causal: right = self.one(-1, 0) if left >= 0 else -1
    elif self.chance(.2): right = self.rng.randint(0, max(self.Sk//2, 2))
    if causal: self.options["causal"] = causal
    if (left, right) != (-1, -1): self.options["window"] = f"({left}, {right})"
    self.facts["window"], self.facts["top_left"] = (left, 0) if causal else (left, right), causal == "'top-left'"
    if self.chance(.2): self.options["softmax_scale"] = repr(self.facts.setdefault("scale", self.one(0.05, 0.3, 0.7, 1.0)))
    if self.chance(.15): self.options["softcap"] = repr(self.facts.setdefault("softcap", self.one(0.5, 2.0, 15.0, 50.0)))

  def extra(self, name:str, shape:tuple[int, ...], kind:str, dtype:str="float32", views:bool=True) -> None:
    self.values(name, kind, shape, dtype)
    self.types[name] = dtype
    self.place(name, f"x[{name!r}]", dtype, shape, views=views and name == "bias" and self.device_count == 1 and self.chance(.4))
    self.options[name] = name

  def integers(self, name:str, *of:Any, kind:str="int32") -> None:
    self.arrays[name] = f"integers(np.{kind}, {', '.join(map(str, of))})"
    self.outside[name] = f"Tensor(x[{name!r}], device={self.device!r})" + (".realize()" if self.jit else "")
    self.options[name] = name

  def slopes(self) -> None:
    if not self.chance(.15): return
    shape = (self.B, self.H) if self.chance(.3) else (self.H,)
    self.extra("alibi_slopes", shape, self.one("positive", "small"), self.one("float32", "float32", "float16"))
  def sinks(self) -> None:
    if self.chance(.15): self.extra("sinks", (self.H,), "normal", self.one("float32", "float32", "bfloat16"))
  def bias(self, p:float=.2) -> None:
    if not self.chance(p): return
    shape = tuple(n if self.chance(.6) else 1 for n in (self.B, self.H, self.Sq, self.Sk))
    while len(shape) > 1 and shape[0] == 1 and self.chance(.4): shape = shape[1:]
    dtype = self.one("float32", "float32" if self.kind == "eight" else self.dtype, "float16", "bfloat16")
    self.extra("bias", shape, "normal" if self.chance(.5) else self.one("masked", "blind", "lowest", "-10000"), dtype)
  def dropout(self, p:float=.1) -> None:
    if not self.chance(p): return
    self.facts["dropout_p"] = self.one(0.1, 0.5, 0.9)
    self.options["dropout_p"] = repr(self.facts["dropout_p"])
    self.integers("dropout_seed", *(self.rng.randrange(2**32) for _ in range(2)), kind="uint32")
  def splits(self, invariant:bool=True) -> None:
    if self.chance(.15): self.options["num_splits"] = repr(1 if self.on in ("CPU", "CL") else self.one(1, 2, 3, 7))
    elif invariant and self.chance(.06): self.options["batch_invariant"] = "True"

  def score_options(self) -> None:
    for option in (self.masks, self.slopes, self.sinks, self.bias, self.dropout): option()

  # ***** the call *****

  def call(self, text:str, lse:bool|None=None, between:str="") -> None:
    # Adds a call to the drawn script, and draws what it returns: o, lse, both, or gradients of a loss through them.
    # `text` is the code of the call, and `between` a line of code that follows it. `lse` says whether the call returns lse; None draws this.
    lse = self.chance(.5) if lse is None else lse
    if self.backward: return self.gradients(text, lse, between)
    self.inside.append(f"{'o, lse' if lse else 'o'} = " + text)
    if between: self.inside.append(between)
    self.wanted = ("o", "lse") if lse else ("o",)
    self.returns("{" + ", ".join(f"{name!r}: {name}" for name in self.wanted) + "}")
    rows = (1 if self.layout == "thd" else self.B, self.H, self.Sq)
    self.restored.setdefault("o", f"restore(found['o'], {self.layout!r}, {(*rows, self.Dv)})")
    if lse: self.restored.setdefault("lse", f"found['lse'].reshape({rows})")

  def returns(self, text:str) -> None:
    if self.jit: self.inside += [f"results = {text}", "Tensor.realize(*results.values())", "return results"]
    else: self.inside.append(f"return {text}")

  def gradients(self, text:str, lse:bool, between:str="") -> None:
    through = self.one(("o",), ("o", "lse"), ("lse",)) if lse else ("o",)
    self.inside.append(f"{'o, lse' if lse else 'o'} = " + text)
    if between: self.inside.append(between)
    batch, terms = 1 if self.layout == "thd" else self.B, []
    if "o" in through:
      self.values("do", self.one("normal", "normal", "large"), (batch, self.H, self.Sq, self.Dv), self.out_dtype)
      if self.dtype != self.out_dtype: self.arrays["do"] = f"rounded({self.arrays['do']}, {self.dtype!r})"     # the law expects dO in this type
      self.outside["do"] = f"tensor(arrange(x['do'], {self.layout!r}), {self.out_dtype!r}, {self.device!r})" + self.of_shards("do")
      terms.append("(o*do).float().sum()")
    if "lse" in through:
      self.values("dlse", "normal", (batch, self.H, self.Sq), "float32")
      shape = {"nsd": (self.B*self.H, self.Sq), "thd": (self.H, self.Sq)}.get(self.layout, (self.B, self.H, self.Sq))
      self.outside["dlse"] = f"tensor(x['dlse'].reshape({shape}), 'float32', {self.device!r})" + self.of_shards("dlse")
      terms.append("(lse.isinf().where(0.0, lse)*dlse).sum()")
    if self.jit:
      for name in ("do", "dlse"):
        if name in self.outside: self.outside[name] += ".realize()"
    self.inside.append(f"loss = {' + '.join(terms)}")
    may_be_read = self.settings.get("TRAINING") and "out" not in self.options and self.kind not in ("custom", "shards")     # docs/attention.md
    if may_be_read and not self.jit and self.chance(.3): self.inside.append("loss.item()")
    there = [name for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes") if name in self.outside]
    self.wanted = tuple(there if self.chance(.6) else [name for name in there if self.chance(.5)] or there[:1])
    names = ", ".join(self.wanted)
    self.inside.append(f"gradients = dict(zip({self.wanted!r}, loss.gradient({names})))")
    self.returns("gradients")
    for name, h, s, d in (("q", self.H, self.Sq, self.D), ("k", self.Hkv, self.Sk, self.D), ("v", self.Hkv, self.Sk, self.Dv)):
      if name in self.wanted: self.restored.setdefault(name, f"restore(found[{name!r}], {self.layout!r}, {(batch, h, s, d)})")

  def of_shards(self, name:str) -> str: return self.settings.get("shards", {}).get(name, "")

  def attention(self, more:str="") -> str:
    # Returns the code of a call of attn.attention with all drawn options and the further arguments `more`.
    options = "".join(f", {name}={value}" for name, value in self.options.items())
    return f"attn.attention(q, k, {'None' if self.facts.get('v_dim') else 'v'}{options}{more})"

  def common(self, lse:bool|None=None, between:str="") -> None:
    # Adds a call of attn.attention with all drawn options, layout and dtype of the output; `lse` and `between` are as in `call`.
    if self.layout != "bhsd": self.options["layout"] = repr(self.layout)
    if self.out_dtype != self.dtype: self.options["out_dtype"] = self.one(repr(self.out_dtype), f"DTYPES[{self.out_dtype!r}]")
    lse = self.chance(.5) if lse is None else lse
    if lse: self.options["return_lse"] = "True"
    self.call(self.attention(), lse, between=between)

  # ***** kinds of calls *****

  def dense(self) -> None:
    self.layout = self.one("bhsd", "bhsd", "bshd", "nsd")
    if self.layout == "nsd": self.B = 1
    self.held_to_work()
    far = self.far_reaching() if self.chance(.06) else None
    self.inputs(may_be_same=not self.backward, kinds=far)
    self.three()
    if far is None: self.score_options()
    self.splits()
    if self.chance(.05) and self.turns == 1:
      shape = self.shape_in(self.layout, self.H, self.Sq, self.Dv)
      self.outside["out"] = f"Tensor.empty(*{shape}, dtype=DTYPES[{self.out_dtype!r}], device={self.device!r}).realize()"
      self.options["out"] = "out"
    self.common()

  def eight(self) -> None:
    # Draws a call with q, k and v of the chip's 8-bit floats, or a dense call if the chip has none.
    if self.on in MACHINE or not (own := get_chip(self.on).fp8): return self.dense()
    self.dtype, self.out_dtype, self.layout = own, self.one("float16", "bfloat16", "float32"), self.one("bhsd", "bhsd", "bshd", "nsd")
    if self.layout == "nsd": self.B = 1
    self.held_to_work()
    self.D, self.Dv = (-(-min(n, 256)//16)*16 for n in (self.D, self.Dv))      # most units take rows of whole 16 bytes
    self.inputs(kinds=self.one({}, {}, {}, {"q": "positive", "k": "rising"}, {"q": "positive", "k": "falling"}, {"q": "large"}, {"v": "large"},
                               {"q": "constant", "k": "constant"}, {"k": "zero"}, {"q": "small", "v": "small"}, {"q": "nan"}, {"k": "nan"}))
    for name in "qkv":
      self.outside[name] = self.tensor(f"arrange(x[{name!r}], {self.layout!r})")
      self.inside.append(f"{name} = {name}.bitcast(dtypes.{own})")
    for name in ("q_scale", "k_scale", "v_scale"):
      if not self.chance(.4): continue
      shape = self.one((1,), (self.Hkv,) if self.layout == "nsd" else (self.B, self.Hkv))
      self.arrays[name] = f"np.exp2(values('normal', {shape}, 'float32', {self.rng.randrange(10**6)}))"
      self.outside[name] = f"Tensor(x[{name!r}], device={self.device!r}).realize()"
      self.options[name] = name
    self.after.append(f"x |= times_scales(x, {self.B}, {self.Hkv})")
    for option in (self.masks, self.slopes, self.sinks, self.bias): option()
    if self.chance(.2) and self.layout != "nsd": self.integers("kv_lengths", *(self.rng.randint(0, self.Sk) for _ in range(self.B)))
    fast = self.chance(.2)
    if fast: self.options["fast_accumulate"] = "True"
    if self.on in SHORT_SUMS: self.facts["short"] = ShortSums(SHORT_SUMS[self.on], 0 if fast else 128)
    self.splits()
    self.common()

  def lengths(self) -> None:
    # Draws a call with kv_lengths, as a tensor, a number or a Variable, and in some draws kv_starts.
    self.layout = self.one("bhsd", "bshd")
    self.held_to_work()
    self.inputs()
    self.three()
    if self.chance(.7): ends = [self.rng.randint(0, self.Sk) for _ in range(self.B)]
    else: ends = [self.rng.randint(0, self.Sk)]*self.B
    form = self.one("tensor", "tensor", "int", "variable")
    if form == "tensor": self.integers("kv_lengths", *ends)
    else:
      ends = ends[:1]*self.B
      self.arrays["kv_lengths"] = f"integers(np.int32, {', '.join(map(str, ends))})"
      if form == "int": self.options["kv_lengths"] = str(ends[0])
      elif self.turns > 1:
        self.each.append(f"n = {tuple(self.rng.randint(0, self.Sk) for _ in range(self.turns))}[turn]")
        self.arrays["kv_lengths"] = f"integers(np.int32, *[n]*{self.B})"
        self.outside["n"], self.options["kv_lengths"] = f"Variable('n', 0, {self.Sk}).bind(n)", "n"
      else: self.outside["n"], self.options["kv_lengths"] = f"Variable('n', 0, {self.Sk}).bind({ends[0]})", "n"
    for option in (self.masks, self.slopes, self.sinks): option()
    if form == "tensor" and self.chance(.4): self.integers("kv_starts", *(self.rng.randint(0, n) for n in ends))
    else: self.bias()
    self.dropout()
    self.splits()
    if not self.backward: self.poison()
    self.common()

  def poison(self) -> None:
    # Writes NaN to rows of k and v that must have no effect: rows beyond the length, or before the start, of each sequence.
    for name in ("k", "v"):
      if name == "v" and self.facts.get("v_dim"): continue
      self.outside[name] = self.outside[name].replace(f"x[{name!r}]", f"unseen(x[{name!r}], x)")

  def ends(self, count:int, total:int) -> list[int]:
    # Draws where packed sequences begin and end: `count` + 1 numbers in ascending order, up to `total` rows.
    inner = sorted(self.rng.randint(0, total) for _ in range(count - 1))
    # Some rows may belong to no sequence, and a sequence may be empty.
    first, last = (0, total) if self.chance(.7) else (min(2, total), max(total - 3, min(2, total)))
    return [first, *(min(max(n, first), last) for n in inner), last]

  def packed(self) -> None:
    self.layout, self.B = "thd", 1
    count = self.one(1, 2, 3, 5)
    self.held_to_work()
    self.inputs()
    self.three()
    q_ends, k_ends = self.ends(count, self.Sq), self.ends(count, self.Sk)
    if self.Sq == self.Sk and self.chance(.6): k_ends = q_ends
    self.integers("cu_seqlens_q", *q_ends)
    self.integers("cu_seqlens_k", *k_ends)
    for name, ends in (("max_seqlen_q", q_ends), ("max_seqlen_k", k_ends)):
      if self.chance(.5): self.options[name] = str(longest(ends) + self.one(0, 0, 7))
    self.masks()
    if self.chance(.15): self.extra("alibi_slopes", (count, self.H) if self.chance(.4) else (self.H,), "positive")
    self.sinks()
    self.dropout()
    self.splits()
    self.common()

  def latent(self) -> None:
    # Draws a call of multi-head latent attention (MLA): V is the first columns of K.
    self.layout = self.one("bhsd", "bshd", "bhsd")
    if self.chance(.15) and not self.backward: self.B, self.Hkv, self.H, self.D, self.Dv, self.Sq, self.Sk = 1, 1, 16, 576, 512, self.one(1, 2), 40
    else: self.Dv = self.rng.randint(1, self.D)
    self.held_to_work()
    self.Dv = min(self.Dv, self.D)
    self.facts["v_dim"] = self.Dv
    self.options["v_dim"] = str(self.Dv)
    self.inputs()
    self.three()
    self.masks()
    self.sinks()
    if self.chance(.4): self.integers("kv_lengths", *(self.rng.randint(0, self.Sk) for _ in range(self.B)))
    self.splits()
    self.common()

  def flash(self) -> None:
    # Draws a call of one of FlashAttention's functions, for whole or packed sequences, with q, k and v in separate tensors or in one.
    self.out_dtype = self.dtype
    form, varlen = self.one("", "kv", "qkv"), self.chance(.5)
    if form: self.Dv = self.D
    if form == "qkv": self.Hkv, self.Sk = self.H, self.Sq
    self.layout = "thd" if varlen else "bshd"
    if varlen: self.B = 1
    self.held_to_work()
    if form == "qkv": self.Sk = self.Sq = min(self.Sq, self.Sk)
    self.inputs()
    self.three()
    self.masks()
    if self.facts["top_left"]: self.options["causal"], self.facts["top_left"] = "True", False
    if self.options.get("causal") == "'bottom-right'": self.options["causal"] = "True"
    if "window" in self.options: self.options["window_size"] = self.options.pop("window")
    sequences = ""
    if varlen:
      count = self.one(1, 2, 4)
      ends = self.ends(count, self.Sq), self.ends(count, self.Sk)
      if form == "qkv": ends = ends[0], ends[0]
      for name, of in zip(("cu_seqlens_q", "cu_seqlens_k"), ends): self.integers(name, *of)
      sequences = f"cu_seqlens_q, {longest(ends[0])}, "
      if form != "qkv": sequences = f"cu_seqlens_q, cu_seqlens_k, {longest(ends[0])}, {longest(ends[1])}, "
      for name in ("cu_seqlens_q", "cu_seqlens_k"): self.options.pop(name)
      if form == "qkv": self.outside.pop("cu_seqlens_k")
    if self.chance(.2): self.extra("alibi_slopes", (self.H,), "positive")
    lse = self.chance(.5)
    if lse: self.options["return_attn_probs"] = "True"
    axis, names = -3, {"": "q, k, v", "kv": f"q, Tensor.stack(k, v, dim={-3})", "qkv": f"Tensor.stack(q, k, v, dim={-3})"}[form]
    if form: names = names.replace(f"dim={axis}", f"dim={1 if varlen else 2}")
    options = ", ".join(f"{name}={value}" for name, value in self.options.items())
    function = f"flash_attn.flash_attn_{'varlen_' if varlen else ''}{form + 'packed_' if form else ''}func"
    self.call(f"{function}({names}, {sequences}{options})".replace(", )", ")") + ("[:2]" if lse else ""), lse)

  def sdpa(self) -> None:
    # Draws a call of scaled_dot_product_attention: attn's function, or tinygrad's method while attn is installed.
    self.out_dtype = self.dtype
    self.held_to_work()
    self.inputs()
    self.three()
    options = {}
    if self.Hkv < self.H: options["enable_gqa"] = "True"
    if self.chance(.4): options["is_causal"], self.facts["window"], self.facts["top_left"] = "True", (-1, 0), True
    elif self.chance(.5):
      shape = tuple(n if self.chance(.7) else 1 for n in (self.B, self.H, self.Sq, self.Sk))
      of_bools = not self.backward and self.chance(.3)
      self.extra("bias", shape, self.one("normal", "masked", "blind", "lowest", "-10000"), self.one("float32", self.dtype), views=not of_bools)
      options["attn_mask"] = "bias"
      if of_bools:
        self.arrays["bias"] = self.arrays["bias"].replace("values(", "bools(values(") + ")"
        self.outside["bias"] = f"Tensor(x['bias'] == 0, device={self.device!r})" + (".realize()" if self.jit else "")
    scale = self.chance(.2)
    if scale: options["scale"] = repr(self.facts.setdefault("scale", 0.3))
    ranks = [4, 4, 4, 5, *[3]*(self.B == 1), *[2]*(self.B == self.H == self.Hkv == 1)]
    rank = self.one(*ranks)
    three, back = "q, k, v", ""
    if rank != 4:
      change = "unsqueeze(0)" if rank > 4 else ".".join(["squeeze(0)"]*(4 - rank))
      self.inside.append(f"ranked = [t.{change} for t in (q, k, v)]")
      three, back = "*ranked", f"o = o.reshape({(self.B, self.H, self.Sq, self.Dv)})"
      if "attn_mask" in options: options["attn_mask"] = f"bias.{change}"
    given = "".join(f", {name}={value}" for name, value in options.items())
    function = self.one("attn.scaled_dot_product_attention", "by_attn")
    self.call(f"{function}({three}{given})", False, between=back)

  def custom(self) -> None:
    # Draws a call that runs attn's kernel function by tinygrad's Tensor.custom_kernel.
    self.layout = self.one("bhsd", "bshd", "nsd")
    if self.layout == "nsd": self.B = 1
    self.held_to_work()
    self.inputs()
    self.three(views=False)
    self.masks()
    lse, names = self.chance(.5), []
    if self.chance(.2): self.extra("alibi_slopes", (self.H,), "positive")
    if self.chance(.2):
      self.extra("bias", tuple(n if self.chance(.6) else 1 for n in (self.B, self.H, self.Sq, self.Sk)), "normal", self.dtype)
    if self.chance(.2): self.extra("sinks", (self.H,), "normal")
    if self.chance(.2) and self.layout != "nsd": self.integers("kv_lengths", *(self.rng.randint(0, self.Sk) for _ in range(self.B)))
    names = [name for name in ("alibi_slopes", "bias", "sinks", "kv_lengths") if name in self.options]
    for name in names: self.options.pop(name)
    if self.layout != "bhsd": self.options["layout"] = repr(self.layout)
    if lse: self.options["return_lse"] = "True"
    rows = (self.B*self.H, self.Sq) if self.layout == "nsd" else (self.B, self.H, self.Sq)
    outs = f"Tensor.empty(*{self.shape_in(self.layout, self.H, self.Sq, self.Dv)}, dtype=DTYPES[{self.out_dtype!r}], device={self.device!r})"
    if lse: outs += f", Tensor.empty(*{rows}, dtype=dtypes.float, device={self.device!r})"
    options = "".join(f"{name}={value}, " for name, value in self.options.items()) + f"extras={tuple(names)!r}"
    given = ", ".join(("q", "k", "v", *names))
    self.call(f"Tensor.custom_kernel({outs}, {given}, fxn=attn.flash_attention_fn({options})){'[:2]' if lse else '[0]'}", lse)

  # ***** several devices *****

  def shards(self) -> None:
    # Draws a call over several devices, each of which holds a part of the batches, heads, rows or keys, or all of them.
    self.device_count = n = self.one(*COUNTS)
    shared = self.one("batch", "heads", "rows", "rows", "rows", "keys", "keys", "none", "one head")
    self.layout = self.one("bhsd", "bhsd", "bshd") if shared in ("batch", "none") else self.one("bhsd", "bshd", "nsd")
    if self.layout == "nsd": self.B = 1
    if shared == "batch": self.B = n
    if shared == "heads":
      self.Hkv = n
      self.H = n*self.one(1, 1, 2)
    if shared == "one head":
      self.Hkv, self.H = 1, n*self.one(1, 2)
      if self.layout == "nsd": self.layout = "bshd"
    if n > 3 and self.B*self.H > 8 and shared in ("rows", "keys", "none"): self.B, self.H, self.Hkv = 1, 2, self.one(1, 2)
    if shared in ("rows", "keys"): self.Sq, self.Sk = min(self.Sq, 130), min(self.Sk, 130)
    self.held_to_work()
    self.inputs()
    at, axes = self.devices, AXES[self.layout]
    order = self.one("zigzag", "contiguous")
    b, h, s = ({"b": axes.find("b"), "h": axes.find("h"), "s": axes.find("s")}[x] for x in "bhs")
    of_shards = {"batch": dict.fromkeys("qkv", b), "heads": dict.fromkeys("qkv", h), "one head": {"q": h, "k": None, "v": None}}.get(shared)
    for name, heads, rows, d in (("q", self.H, self.Sq, self.D), ("k", self.Hkv, self.Sk, self.D), ("v", self.Hkv, self.Sk, self.Dv)):
      if shared == "rows" or (shared == "keys" and name != "q"): after = f"; attn.shard_sequence({at}, {s}, {order!r})"
      else: after = f".shard({at}, {None if of_shards is None else of_shards[name]})"
      shape = self.shape_in(self.layout, heads, rows, d)
      if after.startswith(";"): self.dealt(name, f"arrange(x[{name!r}], {self.layout!r})", self.dtype, shape, s, order)
      else: self.place(name, f"arrange(x[{name!r}], {self.layout!r})", self.dtype, shape, after=after)
    self.masks()
    before = set(self.outside)
    self.slopes()
    self.sinks()
    self.bias(.15)
    if shared in ("batch", "heads", "one head", "none"): self.dropout()
    if shared in ("batch", "none") and self.chance(.2): self.integers("kv_lengths", *(self.rng.randint(0, self.Sk) for _ in range(self.B)))
    for name in [x for x in self.outside if x not in before]:       # on each device, or on the first device, from which attention copies it
      if self.chance(.6): self.outside[name] += f".shard({at})"
    if shared in ("rows", "keys"):
      self.options["sequence_order"] = repr(order)
      self.options["sequence_lengths"] = f"({self.Sq}, {self.Sk})"
    if shared != "rows": self.splits(invariant=shared != "keys")
    lse_axes = "hs" if self.layout == "nsd" else "bhs"
    back = ""
    if shared == "rows":
      self.settings["shards"] = {}
      back = f"o = attn.unshard_sequence(o, {s}, {self.Sq}, {order!r})"
      self.settings["lse back"] = f"lse = attn.unshard_sequence(lse, {lse_axes.find('s')}, {self.Sq}, {order!r})"
    else:
      of_o = None if of_shards is None else of_shards["q"]
      of_lse = None if of_o is None else lse_axes.find(axes[of_o])
      self.settings["shards"] = {"do": f".shard({at}, {of_o})", "dlse": f".shard({at}, {of_lse})"}
    lse = self.chance(.5)
    if lse and "lse back" in self.settings: back += "; " + self.settings["lse back"]
    self.common(lse, back)

  def dealt(self, name:str, text:str, dtype:str, shape:tuple[int, ...], axis:int, order:str) -> None:
    # Adds q, k or v to the drawn script, as a tensor whose sequence is divided over devices in the given `order`.
    # `attn.shard_sequence` divides the tensor either before the call of `step` or inside `step`. If inside, the script checks the gradient of the
    # tensor before it is divided.
    if self.jit or (not self.backward and self.chance(.5)):
      self.outside[name] = f"attn.shard_sequence(tensor({text}, {dtype!r}, {self.device!r}), {self.devices}, {axis}, {order!r}).realize()"
      if self.backward:
        rows = self.Sq if name == "q" else self.Sk
        self.restored[name] = f"restore(found[{name!r}], {self.layout!r}, {(self.B, *self.sizes_of(name))})"
        self.settings.setdefault("gather", {})[name] = f"attn.unshard_sequence(gradients[{name!r}], {axis}, {rows}, {order!r})"
    else:
      self.place(name, text, dtype, shape)
      self.inside.append(f"dealt_{name} = attn.shard_sequence({name}, {self.devices}, {axis}, {order!r})")
      self.settings.setdefault("dealt", []).append(name)

  def sizes_of(self, name:str) -> tuple[int, int, int]:
    return {"q": (self.H, self.Sq, self.D), "k": (self.Hkv, self.Sk, self.D), "v": (self.Hkv, self.Sk, self.Dv)}[name]

  # ***** caches *****

  def cache(self) -> None:
    # Draws several steps, each of which appends rows to a cache, in pages or not, and attends to the cache.
    self.out_dtype = self.dtype
    paged, form = self.chance(.45), self.one("kv_cache", "append", "flash")
    self.layout = "bshd" if form == "flash" else self.one("bhsd", "bshd")
    self.turns, self.jit = self.one(1, 2, 3, 4), self.chance(.4)
    if self.jit: self.turns = 4
    rotary, indexed, padded = (form == "flash" and self.chance(.4) for _ in range(3))
    indexed &= not paged
    each = [self.one(1, 1, 2, 5)]*4 if self.jit else [self.one(1, 1, 3, 7, 20) for _ in range(4)]
    begin = [self.rng.randint(0, 70) for _ in range(self.B)]
    lengths = self.one("tensor", "tensor", "int", "variable") if not self.jit else self.one("tensor", "variable")
    if lengths != "tensor": begin = begin[:1]*self.B
    self.Sq = max(each)
    capacity = self.Sk = max(begin) + sum(each[:self.turns]) + self.one(0, 1, 9, 60)
    size = self.one(1, 3, 7, 8, 16, 32, 64)
    if paged: capacity = self.Sk = -(-capacity//size)*size
    sizes = (self.B, self.Hkv, capacity)
    self.before += [f"rows = {{'k': values('normal', {(*sizes, self.D)}, {self.dtype!r}, {self.rng.randrange(10**6)}), "
                    f"'v': values('normal', {(*sizes, self.Dv)}, {self.dtype!r}, {self.rng.randrange(10**6)})}}",
                    f"begin, each, counted = np.array({begin}, np.int32), {each[:self.turns]}, 0",
                    "filled = {name: until(a, begin) for name, a in rows.items()}"]
    if paged:
      most, count = capacity//size, self.B*(capacity//size) + self.one(0, 3)
      table = self.rng.sample(range(count), self.B*most)
      self.before += [f"table = np.array({table}, np.int32).reshape({self.B}, {most})",
                      f"k_cache, v_cache = ({self.tensor(f'paged(filled[n], table, {size}, {count})')} for n in 'kv')",
                      f"block_table = Tensor(table, device={self.device!r}).realize()"]
      self.options["block_table"] = "block_table"
    elif indexed:
      batches = self.B + self.one(0, 2)
      self.before += [f"batches = np.array({self.rng.sample(range(batches), self.B)}, np.int32)",
                      f"k_cache, v_cache = ({self.tensor(f'indexed(arrange(filled[n], {self.layout!r}), batches, {batches})')} for n in 'kv')",
                      f"cache_batch_idx = Tensor(batches, device={self.device!r}).realize()"]
      self.options["cache_batch_idx"] = "cache_batch_idx"
    elif self.Dv == self.D and self.chance(.4):
      both = self.tensor(f"np.stack([arrange(filled[n], {self.layout!r}) for n in 'kv'], 1)")
      self.before += [f"both = {both}", "k_cache, v_cache = both[:, 0], both[:, 1]"]
    else: self.before.append(f"k_cache, v_cache = ({self.tensor(f'arrange(filled[n], {self.layout!r})')} for n in 'kv')")
    eight = form != "flash" and self.on != "CL" and self.chance(.4)
    if eight:
      own = "" if self.on in MACHINE else get_chip(self.on).fp8
      format, of_scales = self.one("int8", own or "int8"), self.one("float32", "float16")
      self.before.append(f"k_cache, v_cache = (in_8_bits(cache, {format!r}, {of_scales!r}) for cache in (k_cache, v_cache))")
    self.masks()
    if form == "flash": self.facts["top_left"] = False
    self.slopes()
    if form != "flash": self.sinks()
    self.splits()
    if form == "flash" or (eight and self.plain_uops): self.options.pop("batch_invariant", None)     # tiled has none
    self.each += ["at, new = begin + counted, each[turn]", "counted += new"]
    self.values("q", self.one("normal", "normal", "large"), f"({self.B}, {self.H}, new, {self.D})", self.dtype)
    self.arrays |= {"k": "rows['k']", "v": "rows['v']", "kv_lengths": "at + new"}
    if padded:
      starts = [self.rng.randint(0, n) for n in begin]
      self.arrays["kv_starts"] = f"integers(np.int32, {', '.join(map(str, starts))})"
      self.before.append(f"cache_leftpad = Tensor(np.array({starts}, np.int32), device={self.device!r}).realize()")
      self.options["cache_leftpad"] = "cache_leftpad"
    for name in "kv": self.outside[f"{name}_new"] = self.tensor(f"arrange(rows_of_steps(rows[{name!r}], at, new), {self.layout!r})")
    self.outside["q"] = self.tensor(f"arrange(x['q'], {self.layout!r})")
    if rotary: self.turned(capacity)
    self.outside["n"] = {"tensor": f"Tensor(at, device={self.device!r}).realize()", "int": "int(at[0])",
                         "variable": f"Variable('n', 0, {capacity}).bind(int(at[0]))"}[lengths]
    lse = self.chance(.5)
    def options(**renamed:str) -> str: return "".join(f", {renamed.get(name, name)}={value}" for name, value in self.options.items())
    if form == "flash":
      if "causal" in self.options: self.options["causal"] = "True"
      text = (f"flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=n{options(window='window_size')}"
              + (", return_softmax_lse=True)[:2]" if lse else ")"))
    else:
      self.options["layout"] = repr(self.layout)
      if lse: self.options["return_lse"] = "True"
      if form == "append":
        paging = ", block_table=block_table" if paged else ""
        self.inside.append(f"n = attn.append_kv(k_new, v_new, k_cache, v_cache, n, layout={self.layout!r}{paging})")
        text = f"attn.attention(q, k_cache, v_cache, kv_lengths=n{options()})"
      else:
        if "causal" not in self.options: self.options["causal"] = "False"
        text = f"attn.attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, n{options()})"
    self.restored = {"o": f"restore(found['o'], {self.layout!r}, ({self.B}, {self.H}, new, {self.Dv}))",
                     "lse": f"found['lse'].reshape({self.B}, {self.H}, new)"}
    self.call(text, lse)
    want = f"paged(until(rows[name], at + new), table, {size}, {count})" if paged else f"arrange(until(rows[name], at + new), {self.layout!r})"
    if indexed: want = f"indexed({want}, batches, {batches})"
    if eight:
      in_pages = f", table, {size}" if paged else ""
      self.after.append(f"x |= held_in_8_bits((k_cache, v_cache), {format!r}, rows, at + new, {self.layout!r}{in_pages})")
      return
    self.after += [f"for name, cache in (('k', k_cache), ('v', v_cache)): np.testing.assert_array_equal(array(cache), {want}, f'{{name}}_cache')"]

  def turned(self, positions:int) -> None:
    # Makes the drawn call compute a rotary embedding, with `positions` rows of tables of angles.
    # q and the new rows of k are rotated backwards first, so that the embedding gives the rows from which the expected result is computed. Angles are
    # quarter turns, so that the embedding is exact in every dtype.
    half, interleaved = self.rng.randint(1, max(self.D//2, 1)), self.one(True, False)
    moving = "causal" in self.options or "window" in self.options
    if self.D < 2: return
    self.before += [f"quarters = np.random.default_rng({self.rng.randrange(10**6)}).integers(4, size=({positions}, {half}))",
                    "rotary_cos, rotary_sin = (tensor(np.float32(of)[quarters], "
                    f"{self.dtype!r}, {self.device!r}).realize() for of in ((1, 0, -1, 0), (0, 1, 0, -1)))"]
    for name, rows, moves in (("q", "x['q']", moving), ("k_new", "rows_of_steps(rows['k'], at, new)", True)):
      self.outside[name] = self.tensor(f"arrange(turned_back({rows}, quarters, at, {interleaved}, {moves}), {self.layout!r})")
    self.options |= {"rotary_cos": "rotary_cos", "rotary_sin": "rotary_sin", "rotary_interleaved": repr(interleaved)}

  def pages(self) -> None:
    # Draws a call over keys and values in pages, in some draws with packed queries.
    self.layout = self.one("bhsd", "bshd", "nsd", "bhsd")
    self.held_to_work()
    # The block table also has invalid page numbers, which no kernel may use.
    size = self.one(1, 3, 7, 8, 16, 20, 32, 64, 128)
    most = -(-self.Sk//size)
    self.Sk, count = size*most, self.B*most + self.one(0, 3)
    self.inputs()
    ends = [self.rng.randint(0, self.Sk) for _ in range(self.B)]
    self.before.append(f"table = np.array({self.rng.sample(range(count), self.B*most)}, np.int32).reshape({self.B}, {most})")
    self.each.append(f"read_table = entries(table, {ends}, {size})")
    self.place("q", f"arrange(x['q'], {self.layout!r})", self.dtype, self.shape_in(self.layout, self.H, self.Sq, self.D))
    self.integers("kv_lengths", *ends)
    for name, d in (("k", self.D), ("v", self.Dv)):
      self.place(name, f"paged(unseen(x[{name!r}], x), table, {size}, {count})", self.dtype, (count, size, self.Hkv, d))
    self.outside["block_table"] = f"Tensor(read_table, device={self.device!r}).realize()"
    self.options["block_table"] = "block_table"
    self.masks()
    if self.layout != "nsd":
      self.slopes()
      self.sinks()
    if self.chance(.15) and self.layout != "nsd": self.integers("kv_starts", *(self.rng.randint(0, n) for n in ends))
    elif self.layout != "nsd": self.bias(.1)
    self.splits()
    self.common()

  def sliced(self) -> None:
    # Draws a call of scaled_dot_product_attention over slices of a cache whose length is a Variable, as in tinygrad's models.
    self.out_dtype, self.B, self.layout = self.dtype, self.one(1, 1, 2), "bhsd"
    self.Dv = self.D
    self.held_to_work()
    self.Sq = min(self.Sq, self.Sk)
    causal = self.chance(.6) and self.Sq > 1
    self.inputs()
    self.place("q", "x['q']", self.dtype, (self.B, self.H, self.Sq, self.D), views=False)
    self.outside["cache"] = f"tensor(np.stack([x['k'], x['v']]), {self.dtype!r}, {self.device!r}).realize()"
    self.each.append(f"n = {tuple(self.rng.randint(0, self.Sk - self.Sq) for _ in range(self.turns))}[turn]")
    self.arrays["kv_lengths"] = f"integers(np.int32, *[n + {self.Sq}]*{self.B})"
    self.outside["n"] = f"Variable('n', 0, {max(self.Sk - self.Sq, 1)}).bind(n)"
    self.inside.append(f"k, v = cache[0, :, :, :n + {self.Sq}], cache[1, :, :, :n + {self.Sq}]")
    mask = f", Tensor.full((1, 1, {self.Sq}, {self.Sq} + n), -float('inf'), dtype=DTYPES[{self.dtype!r}]).triu(n + 1)" if causal else ""
    if causal: self.facts["window"] = (-1, 0)
    self.call(f"by_attn(q, k, v{mask}{', enable_gqa=True' if self.Hkv < self.H else ''})", False)

  # ***** the script *****

  def script(self, seed:int) -> str:
    device = self.on if self.on in MACHINE else f"EMU::{self.on}"
    settings = "".join(f", {name}={value!r}" for name, value in self.settings.items() if name.isupper() or name in ("kernel", "guard"))
    lines = [f"# python test/night.py --seed {seed}", "from night_script import *", "got = []", f"with on({device!r}{settings}):"]
    dealt = self.settings.get("dealt", [])
    three = ", ".join(f"dealt_{name}" if name in dealt else name for name in "qkv")
    inside = [line.replace("attn.attention(q, k, v,", f"attn.attention({three},") for line in self.inside]
    for name, text in self.settings.get("gather", {}).items():
      if name in self.wanted: inside.insert(-3 if self.jit else -1, f"gradients[{name!r}] = {text}")
    order = self.rng.sample(self.wanted, len(self.wanted))
    lines += [f"  {line}" for line in self.before]
    lines += [f"  def step({', '.join(self.outside)}):", *(f"    {line}" for line in inside)]
    if self.jit: lines.append("  step = TinyJit(step)")
    lines += [f"  for turn in range({self.turns}):", *(f"    {line}" for line in self.each), "    x = {}"]
    lines += [f"    x[{name!r}] = {text}" for name, text in self.arrays.items()]
    lines += ["    given = {", *(f"      {name!r}: {text}," for name, text in self.outside.items()), "    }"]
    lines.append(f"    found = read(step(**given), {tuple(order)!r}, {self.chance(.4)})")
    lines += [f"    found[{name!r}] = {text}" for name, text in self.restored.items() if name in self.wanted]
    return "\n".join([*lines, *(f"    {line}" for line in self.after), "    got.append((x, found))"]) + "\n"

KINDS = {   # weights of each kind, forward and backward
  "dense": (30, 36), "lengths": (12, 10), "packed": (12, 14), "pages": (9, 0), "latent": (5, 4), "flash": (8, 8), "sdpa": (7, 8), "cache": (10, 0),
  "shards": (16, 22), "custom": (4, 4), "sliced": (3, 0), "eight": (8, 0)}

def drawn(seed:int, on:str="") -> Call:
  # Draws the random call that belongs to a seed; `on` replaces the drawn chip or device.
  rng = random.Random(seed)
  direction = "backward" if rng.random() < 1/3 else "forward"
  chosen = rng.choice((*CHIPS, "CPU", "CL"))
  p = DrawnCall(rng, on or chosen, direction == "backward")
  several = p.on not in ("CL", "CUDA")     # a machine has only one device of this kind
  p.kind, = rng.choices(list(KINDS), [weights[p.backward]*(several or kind != "shards") for kind, weights in KINDS.items()])
  p.jit = rng.random() < .15
  p.turns = 3 if p.jit else 1
  if p.backward: p.settings["TRAINING"] = rng.choice((0, 1))
  if p.on not in MACHINE: p.settings["NOOPT"] = int(rng.random() < .9)
  if p.on == "CPU": p.settings["guard"] = SIDES[seed % 4 == 0]     # kernels more often run past the end than before the beginning
  if rng.random() < .04: p.settings["kernel"] = rng.choice((*["backward_three_pass"]*p.backward, "three_pass", "tiled"))
  p.sizes()
  getattr(p, p.kind)()
  scale = p.facts.pop("scale", None) or p.D**-.5
  facts = Facts(p.dtype, p.out_dtype, scale, p.wanted, types=tuple(p.types.items()), flushes=p.on in FLUSHING, emulates=p.on == "CL",
                **p.facts)
  return Call(seed, p.on, direction, p.kind, p.script(seed), facts)
