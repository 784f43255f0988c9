"""Serves requests of different lengths that come and go, over one paged cache. In each step every running request gets one token.

The model is a small transformer with random weights. `Pages` hands out the pages of the cache; requests whose prompts begin with the same tokens
share pages. `Server.admit` fills the cache with the keys and values of a new request's prompt, in chunks. `Server.step` computes one token for every
request: a batch of a fixed size under TinyJit, in which an empty place has length 0. With batch_invariant=True a request gets the same text whatever
is served beside the request. To show this, the program serves each request again at the end, alone. With CACHE=int8, a second server has a cache of 8
bits in the same memory. This server serves twice as many requests at a time, and the texts of both servers are printed side by side.

REQUESTS=8 LAYERS=2 WIDTH=64 BATCH=4 python examples/serve.py;  on a GPU: DEV=CUDA WIDTH=1024 LAYERS=8 HEADS=16 KV_HEADS=4 REQUESTS=64 BATCH=32
CACHE=int8 python examples/serve.py"""
from __future__ import annotations
import math, os, time
os.environ.setdefault("DEV", "EMU::gfx942")
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
import attn

def setting(name:str, default:int) -> int: return int(os.environ.get(name, default))
VOCABULARY, WIDTH, LAYERS = 97, setting("WIDTH", 32), setting("LAYERS", 1)
H, HKV, BATCH, REQUESTS = setting("HEADS", 2), setting("KV_HEADS", 1), setting("BATCH", 3), setting("REQUESTS", 5)
PAGE, MOST_PAGES, CHUNK, TOKENS = setting("PAGE", 8), setting("MOST_PAGES", 4), setting("CHUNK", 8), setting("TOKENS", 6)
D, CAPACITY, CACHE = WIDTH//H, PAGE*MOST_PAGES, os.environ.get("CACHE", "float16")
assert PAGE % CHUNK == 0, "a chunk of a prompt lies in one page"
rng = np.random.default_rng(0)

class Pages:
  """Records which pages of a cache are free, and which pages hold the beginning of a prompt that other requests may share."""
  def __init__(self, count:int) -> None:
    self.free, self.users, self.prefixes, self.shared = list(range(count)), [0]*count, dict[tuple[int, ...], int](), 0
  def take(self, tokens:list[int], length:int) -> tuple[list[int], int]:
    """Takes pages for a sequence that begins with `tokens` and will have `length` tokens: existing full pages that can be shared, and new pages.
    Returns all these pages, and the number of rows that the existing pages already hold. The page with the last of `tokens` is never shared, because
    the first new token follows from computing this last token."""
    shared = list[int]()
    while (end := (len(shared) + 1)*PAGE) < len(tokens) and (page := self.prefixes.get(tuple(tokens[:end]))) is not None: shared.append(page)
    if (more := -(-length//PAGE) - len(shared)) > len(self.free): raise MemoryError(f"{more} pages wanted, {len(self.free)} free")
    found = shared + [self.free.pop() for _ in range(more)]
    for page in found: self.users[page] += 1
    self.shared += len(shared)
    return found, len(shared)*PAGE
  def remember(self, tokens:list[int], pages:list[int]) -> None:
    """Records the full pages of a prompt that has been computed, so that other requests can share them."""
    for i in range(len(tokens)//PAGE): self.prefixes.setdefault(tuple(tokens[:(i + 1)*PAGE]), pages[i])
  def give_back(self, pages:list[int]) -> None:
    for page in pages:
      self.users[page] -= 1
      if self.users[page]: continue
      self.prefixes = {tokens: p for tokens, p in self.prefixes.items() if p != page}
      self.free.append(page)

@dataclass
class Request:
  prompt: list[int]
  wanted: int
  tokens: list[int] = field(default_factory=list)     # the tokens generated
  pages: list[int] = field(default_factory=list)
  @property
  def rows(self) -> int:
    """Number of rows in the cache: one row for each token except the newest token."""
    return len(self.prompt) + len(self.tokens) - 1

def weight(rows:int, columns:int) -> Tensor: return Tensor((rng.standard_normal((rows, columns))*rows**-.5).astype(np.float16)).realize()

def empty_cache(pages:int, dtype:str) -> tuple[Any, Any]: return attn.empty_paged_cache(pages, PAGE, HKV, D, dtype=dtype, scale_dtype="float16")

def bytes_of_a_page(dtype:str) -> int:
  """Counts the bytes that a page takes in the caches of keys and values of one layer."""
  tensors = [t for cache in empty_cache(1, dtype) for t in (cache if isinstance(cache, attn.QuantizedRows) else (cache,))]
  return sum(math.prod(map(int, t.shape))*t.dtype.itemsize for t in tensors)

class Layer:
  def __init__(self) -> None:
    self.qkv, self.out = weight(WIDTH, (H + 2*HKV)*D), weight(WIDTH, WIDTH)
    self.up, self.down = weight(WIDTH, 2*WIDTH), weight(2*WIDTH, WIDTH)
  def __call__(self, x:Tensor, cache:tuple[Any, Any], filled:Tensor, table:Tensor) -> Tensor:
    """Computes a transformer layer, attention and then two linear layers, on x (B, S, WIDTH). Writes the keys and values of x into `cache`, from row
    `filled` (B) of each sequence on. `table` is the block table, the pages of each sequence."""
    qkv = (x.layernorm().cast(x.dtype) @ self.qkv).reshape(*x.shape[:2], H + 2*HKV, D)
    q, k, v = qkv.split([H, HKV, HKV], dim=2)
    o = attn.attention_with_kv_cache(q, k, v, *cache, filled, layout="bshd", block_table=table, batch_invariant=True)
    x = x + o.reshape(*x.shape) @ self.out
    return (x + (x.layernorm().cast(x.dtype) @ self.up).gelu() @ self.down).realize()

class Model:
  def __init__(self) -> None:
    self.embedding, self.places, self.head = weight(VOCABULARY, WIDTH), weight(CAPACITY, WIDTH), weight(WIDTH, VOCABULARY)
    self.layers = [Layer() for _ in range(LAYERS)]

class Server:
  def __init__(self, model:Model, batch:int, pages:int, dtype:str) -> None:
    """Makes a server of `batch` requests at a time. The cache has `pages` pages of this dtype."""
    self.model, self.pages, self.batch, self.most = model, Pages(pages - batch), batch, 0
    self.caches = [empty_cache(pages, dtype) for _ in range(LAYERS)]
    self.nobodys = [pages - batch + i for i in range(batch)]       # pages for the rows that empty places of the batch append
    self.places_taken = list[Request|None]([None]*batch)
    self.steps = {n: TinyJit(self.forward) for n in (1, CHUNK)}

  def forward(self, tokens:Tensor, filled:Tensor, table:Tensor) -> Tensor:
    """Returns the next token after each of `tokens` (B, S). `filled` is the number of rows that each sequence has in the cache, and `table` the block
    table, the pages of each sequence."""
    at = (filled.reshape(-1, 1) + Tensor.arange(tokens.shape[1], dtype=dtypes.int)).minimum(CAPACITY - 1)
    x = (self.model.embedding[tokens] + self.model.places[at]).realize()
    for layer, cache in zip(self.model.layers, self.caches): x = layer(x, cache, filled, table)
    return (x @ self.model.head).float().argmax(-1).realize()

  def run(self, rows:list[list[int]], filled:list[int], pages:list[list[int]]) -> np.ndarray:
    """Runs `forward` on some sequences, one in each place of the batch, and returns the next token after each token, (B, S). `rows` has the new
    tokens of each sequence, `filled` the number of each sequence's tokens in the cache, and `pages` each sequence's pages. Shorter sequences end with
    padding tokens, which later tokens overwrite in the cache."""
    def int32(x:list[list[int]]|list[int]) -> Tensor: return Tensor(np.array(x, np.int32)).realize()
    table = [p + [own]*(MOST_PAGES - len(p)) for p, own in zip(pages, self.nobodys)]
    return self.steps[len(rows[0])](int32(rows), int32(filled), int32(table)).numpy()

  def admit(self, request:Request) -> None:
    """Gives a request a place in the batch. Computes the keys and values of the request's prompt into the cache, in chunks, without those in pages
    that the request shares with other requests. Stores the request's first new token."""
    request.pages, done = self.pages.take(request.prompt, len(request.prompt) + request.wanted)
    self.places_taken[self.places_taken.index(None)] = request
    while done < len(request.prompt):
      part = request.prompt[done:done + CHUNK]
      found = self.run([part + [0]*(CHUNK - len(part))], [done], [request.pages])[0]
      done += len(part)
    request.tokens = [int(found[len(part) - 1])]
    self.pages.remember(request.prompt, request.pages)

  def step(self) -> None:
    """Computes the next token of every running request."""
    under_way = [r for r in self.places_taken if r is not None]
    self.most, rest = max(self.most, len(under_way)), self.batch - len(under_way)
    newest, pages = [[r.tokens[-1]] for r in under_way], [r.pages for r in under_way]
    found = self.run(newest + [[0]]*rest, [r.rows for r in under_way] + [0]*rest, pages + [[]]*rest)
    for r, token in zip(under_way, found):
      r.tokens.append(int(token[0]))
      if len(r.tokens) == r.wanted: self.finish(r)
  def finish(self, request:Request) -> None:
    self.pages.give_back(request.pages)
    self.places_taken[self.places_taken.index(request)] = None

def serve(server:Server, requests:list[Request]) -> float:
  """Serves all requests. Each request begins as soon as a place in the batch and enough pages are free. Returns the seconds that all requests
  took."""
  waiting, start = list(requests), time.perf_counter()
  while waiting or any(server.places_taken):
    while waiting and None in server.places_taken and len(server.pages.free) >= MOST_PAGES: server.admit(waiting.pop(0))
    server.step()
  return time.perf_counter() - start

def main() -> None:
  common = list(map(int, rng.integers(1, VOCABULARY, PAGE + 1)))       # the beginning of half of the prompts
  requests = [Request((common if i % 2 else []) + list(map(int, rng.integers(1, VOCABULARY, int(rng.integers(1, PAGE))))), TOKENS)
              for i in range(REQUESTS)]
  model, pages = Model(), (BATCH + 1)*MOST_PAGES + BATCH
  server = Server(model, BATCH, pages, "float16")
  seconds, text = serve(server, requests), [r.tokens for r in requests]
  assert len(server.pages.free) == (BATCH + 1)*MOST_PAGES and not server.pages.prefixes
  print(f"{REQUESTS} requests, {REQUESTS*TOKENS} tokens on {Device.DEFAULT}, up to {server.most} at a time: "
        f"{REQUESTS*TOKENS/seconds:.1f} tokens per second, compilation included; "
        f"{server.pages.shared} pages were another request's")
  again = [Request(r.prompt, TOKENS) for r in requests]
  seconds = serve(server, again)
  print(f"the same once more, compiled: {REQUESTS*TOKENS/seconds:.1f} tokens per second")
  alone = [Request(r.prompt, TOKENS) for r in requests[:setting("ALONE", 3)]]
  for request in alone: serve(server, [request])
  assert [r.tokens for r in again] == text and [r.tokens for r in alone] == text[:len(alone)]
  print(f"the same text alone: {text[0]}")
  if CACHE != "float16": beside(model, requests, pages)

def beside(model:Model, requests:list[Request], pages:int) -> None:
  """Serves the requests a second time, from a cache of 8 bits that takes no more memory than `pages` pages of 16 bits. Serves twice as many requests
  at a time. Prints the tokens of each request from both caches side by side."""
  room = pages*bytes_of_a_page("float16")//bytes_of_a_page(CACHE)
  server, again = Server(model, 2*BATCH, room, CACHE), [Request(r.prompt, TOKENS) for r in requests]
  serve(server, again)
  for r, x in zip(requests, again): print(f"16 bits: {r.tokens}   {CACHE}: {x.tokens}")
  same = sum(a == b for r, x in zip(requests, again) for a, b in zip(r.tokens, x.tokens))
  print(f"{CACHE}: {room} pages in the memory of {pages}, up to {server.most} requests at a time; {same} of {REQUESTS*TOKENS} tokens as with 16 bits")

if __name__ == "__main__": main()
