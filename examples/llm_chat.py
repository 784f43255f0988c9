"""A chat with tinygrad's own server, once with attn's kernels and once with tinygrad's own attention. Both chats have the same tokens.

The program writes a tiny GGUF file with random weights. tinygrad.llm loads the file, makes its tokenizer and serves the model over HTTP. The setting
MODEL chooses the model:

  (not set)      grouped-query attention, as in Qwen3
  MODEL=latent   latent attention (MLA), as in DeepSeek's models
  MODEL=hybrid   gated attention and recurrent layers, as in Qwen3.5

tinygrad.llm imports the module tinygrad.llm.kernels, which the wheel of tinygrad 0.14.0 lacks. The module has kernels for RDNA3, which this program
does not need: `stand_in` puts an empty module in its place.

MODEL=latent TOKENS=6 QUESTIONS=1 LAYERS=1 python examples/llm_chat.py"""
from __future__ import annotations
import contextlib, importlib.util, io, json, os, struct, sys, tempfile, threading, types, urllib.request
os.environ.setdefault("DEV", "EMU::gfx942")
os.environ.setdefault("CACHELEVEL", "0")      # the thread of the HTTP server cannot use the disk cache that this thread opens
os.environ.setdefault("JIT", "2")      # without CUDA graphs: tinygrad 0.14.0 puts a launch with no block into them where its size is a Variable
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import numpy as np
from tinygrad import Device, nn
import attn

def stand_in() -> None:
  """Makes an empty substitute for the module tinygrad.llm.kernels.amd, if the installed tinygrad lacks this module."""
  if importlib.util.find_spec("tinygrad.llm.kernels") is not None: return
  amd: Any = types.ModuleType("tinygrad.llm.kernels.amd")
  amd.Linear, amd.amd_custom_kernels_supported, amd.gated_delta_prefill, amd.flash_attention = nn.Linear, lambda device: False, None, None
  sys.modules |= {"tinygrad.llm.kernels": types.ModuleType("tinygrad.llm.kernels"), "tinygrad.llm.kernels.amd": amd}

# ***** a model in a file *****

SPECIAL = ("<|im_start|>", "<|im_end|>")
BYTES = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 256))]
TOKENS = [*BYTES, *(chr(256 + i) for i in range(256 - len(BYTES))), *SPECIAL]      # one token for each byte, in GPT-2's spelling
WIDTH, HIDDEN, HEADS, LAYERS, CONTEXT = 32, 48, 4, int(os.environ.get("LAYERS", "2")), 128
Shapes = dict[str, tuple[int, ...]]

def model(kind:str) -> tuple[str, dict[str, Any], Shapes]:
  """Returns a model's architecture, the model's settings, and the shapes of its weights. `kind` is "grouped", "latent" or "hybrid"."""
  D = WIDTH//HEADS
  settings: dict[str, Any] = {"block_count": LAYERS, "embedding_length": WIDTH, "feed_forward_length": HIDDEN, "context_length": CONTEXT,
                              "attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
                              "rope.freq_base": 1e4}
  shapes: Shapes = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (len(TOKENS), WIDTH)}
  grouped: Shapes = {"attn_q.weight": (WIDTH, WIDTH), "attn_k.weight": (2*D, WIDTH), "attn_v.weight": (2*D, WIDTH),
                     "attn_output.weight": (WIDTH, WIDTH)}
  arch, layers = "qwen3", [grouped]*LAYERS
  if kind == "latent":
    rank, rope, nope = 24, 8, 8
    arch = "deepseek2"
    settings |= {"attention.head_count_kv": 1, "attention.kv_lora_rank": rank, "attention.key_length_mla": nope + rope,
                 "attention.value_length_mla": D, "rope.dimension_count": rope}
    layers = [{"attn_q.weight": (HEADS*(nope + rope), WIDTH), "attn_kv_a_mqa.weight": (rank + rope, WIDTH), "attn_kv_a_norm.weight": (rank,),
               "attn_k_b.weight": (HEADS, rank, nope), "attn_v_b.weight": (HEADS, D, rank), "attn_output.weight": (WIDTH, HEADS*D)}]*LAYERS
  if kind == "hybrid":
    arch, state, inner = "qwen35", 8, 16
    settings |= {"ssm.conv_kernel": 2, "ssm.state_size": state, "ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.inner_size": inner,
                 "full_attention_interval": 2, "attention.key_length": 16}
    channels = inner + 2*state
    recurrent: Shapes = {"attn_qkv.weight": (channels, WIDTH), "attn_gate.weight": (inner, WIDTH), "ssm_alpha.weight": (2, WIDTH),
                         "ssm_beta.weight": (2, WIDTH), "ssm_conv1d.weight": (channels, 2), "ssm_dt.bias": (2,), "ssm_a": (2,),
                         "ssm_norm.weight": (inner//2,), "ssm_out.weight": (WIDTH, inner)}
    gated: Shapes = {"attn_q.weight": (2*HEADS*16, WIDTH), "attn_k.weight": (2*16, WIDTH), "attn_v.weight": (2*16, WIDTH),
                     "attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,), "attn_output.weight": (WIDTH, HEADS*16)}
    layers = [gated if i % 2 else recurrent for i in range(LAYERS)]
  for i, layer in enumerate(layers):
    layer = layer | {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,), "ffn_gate.weight": (HIDDEN, WIDTH), "ffn_up.weight": (HIDDEN, WIDTH),
                     "ffn_down.weight": (WIDTH, HIDDEN)}
    shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
  return arch, settings, shapes

def packed(x:Any) -> bytes:
  """Returns a setting's value in the bytes of a GGUF file: the code of its type, then the value."""
  def text(s:str) -> bytes: return struct.pack("<Q", len(s.encode())) + s.encode()
  if isinstance(x, bool): return struct.pack("<I?", 7, x)
  if isinstance(x, int): return struct.pack("<II", 4, x)
  if isinstance(x, float): return struct.pack("<If", 6, x)
  if isinstance(x, str): return struct.pack("<I", 8) + text(x)
  parts = [text(v) if isinstance(v, str) else struct.pack("<i", v) for v in x]
  return struct.pack("<IIQ", 9, 8 if isinstance(x[0], str) else 5, len(x)) + b"".join(parts)

def write_gguf(path:Path, kind:str) -> None:
  """Writes a GGUF file of a model with random weights in float16. `kind` is "grouped", "latent" or "hybrid"."""
  arch, settings, shapes = model(kind)
  settings = {f"{arch}.{name}": x for name, x in settings.items()} | {
    "general.architecture": arch, "general.name": f"a tiny {kind} model", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1]*256 + [3]*len(SPECIAL), "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>")}
  rng, place, infos, data = np.random.default_rng(0), 0, b"", b""
  for name, shape in shapes.items():
    x = np.ones(shape) if "norm" in name else rng.standard_normal(shape)*(1.0 if name == "token_embd.weight" else 2*shape[-1]**-.5)
    raw = x.astype(np.float16).tobytes()
    infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 1, place)
    data += raw + bytes(-len(raw) % 32)
    place = len(data)
  keys = b"".join(struct.pack("<Q", len(name)) + name.encode() + packed(x) for name, x in settings.items())
  head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(settings)) + keys + infos
  path.write_bytes(head + bytes(-len(head) % 32) + data)

# ***** a chat *****

@contextlib.contextmanager
def served(path:Path) -> Iterator[tuple[str, Any]]:
  """Serves the model in the file `path` with tinygrad's server. Yields the server's address and the model."""
  from tinygrad.llm.cli import FallbackTemplate, LLMServer, SimpleTokenizer
  from tinygrad.llm.model import Transformer
  llm, settings = Transformer.from_gguf(path, CONTEXT)
  tokenizer = SimpleTokenizer.from_gguf_kv(settings)
  with contextlib.redirect_stdout(io.StringIO()):      # the server announces port 0
    server = LLMServer(("127.0.0.1", 0), llm, settings["general.name"], tokenizer, FallbackTemplate(tokenizer))
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try: yield f"http://127.0.0.1:{server.server_address[1]}", llm
  finally:
    server.shutdown()
    thread.join()
    server.server_close()

def chat(path:Path, questions:list[str], count:int) -> tuple[list[str], list[int]]:
  """Asks a served model the questions over HTTP, in one conversation, with answers of at most `count` tokens. Returns the answers, and all tokens of
  the conversation except the newest token."""
  messages, answers = list[dict[str, str]](), list[str]()
  with served(path) as (address, llm):
    for question in questions:
      messages.append({"role": "user", "content": question})
      body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": count, "temperature": 0}).encode()
      request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
      with urllib.request.urlopen(request, timeout=600) as reply: message = json.load(reply)["choices"][0]["message"]
      answers.append(message["content"] or "")
      messages.append({"role": "assistant", "content": answers[-1]})
    return answers, list(llm._cached_tokens)

def main() -> None:
  stand_in()
  kind, count = os.environ.get("MODEL", "grouped"), int(os.environ.get("TOKENS", "5"))
  questions = ["What?", "Why?"][:int(os.environ.get("QUESTIONS", "2"))]
  with tempfile.TemporaryDirectory() as folder:
    write_gguf(path := Path(folder)/"tiny.gguf", kind)
    own = chat(path, questions, count)
    with attn.installed() as decisions: ours = chat(path, questions, count)
  kernels = [x.kernel for x in decisions]
  assert ours == own and kernels and None not in kernels, (ours, own, list(decisions))
  print(f"{kind} on {Device.DEFAULT}: {len(ours[1])} tokens over HTTP, the same with these kernels ({', '.join(sorted({*map(str, kernels)}))}: "
        f"{len(kernels)} calls) as with tinygrad's own attention")

if __name__ == "__main__": main()
