"""Tests that every example runs by itself, without settings, and prints the right output."""
import os, re, subprocess, sys
from pathlib import Path
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent/"examples"
SAYS = {
  "custom_kernel_call": [r"\(1, 4, 200, 64\) on EMU: largest difference from numpy \d\.\de-04"],
  "causal_gqa_bf16": [r"^o .*error .*limit", r"^lse .*error .*limit"],
  "four_architectures": ["gfx942.*32x32x8", "gfx950.*32x32x16", "gfx1100.*16x16x16", "gfx1201.*16x16x16"],
  "show_hip_source": [r"__builtin_amdgcn_mfma_f32_32x32x8f16\(", r"// \d+ lines for gfx942, [1-9]\d* of them matrix instructions"],
  "removed_example_defects": ["right.*passes.*passes", "V transposed.*passes.*fails", "P not scaled.*passes.*fails", "no barrier.*stops it: LdsRace"],
  "two_devices": ["^batch .*error .*limit", "^heads .*error .*limit", "^keys .*error .*limit"],
  "long_context": ["^y .*largest difference from one device"],
  "decode_kv_cache": ["^3 tokens on EMU, the same with the cache as without, position by position, by one compiled step"],
  "train_gpt": [r"8 steps, the loss curves at most 0\.0\d+ apart, 0\.06\d+ allowed; forward: 2 calls"],
  "llm_chat": [r"^latent on EMU: 2\d tokens over HTTP, the same with these kernels \(forward: 3 calls\) as with tinygrad's own attention"],
  "serve": [r"^5 requests, 30 tokens on EMU, up to 3 at a time: [\d.]+ tokens per second", "^the same text alone",
            r"^int8: 33 pages in the memory of 19, up to 5 requests at a time; [23]\d of 30 tokens as with 16 bits"],
  "stable_diffusion_vae_attention": [r"^64 positions, one head of 512, float on EMU", r"these kernels: .* ms a call, 0\.000 MB",
                                     r"difference \d\.\de-0[67]"],
  "tiny_gpt": [r"^these kernels: .*\(forward: 4 calls\)"],
}

def run(name:str, *args:str, **settings:str) -> subprocess.CompletedProcess[str]:
  environment = {k: v for k, v in os.environ.items() if k not in ("DEV", "ATTN_EMU_CHECKS")} | {"PYTHONPATH": str(EXAMPLES.parent)} | settings
  return subprocess.run([sys.executable, str(EXAMPLES/f"{name}.py"), *args], capture_output=True, text=True, timeout=300, env=environment)

def test_every_example_is_here() -> None: assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)

# Smaller runs of the examples: each new prompt length and each layer of a training step needs its own kernels. NOOPT=1 stops tinygrad from
# unrolling its own kernels.
SETTINGS = {"train_gpt": {"STEPS": "8", "LAYERS": "1", "NOOPT": "1"}, "long_context": {"GRADIENT": "0", "NOOPT": "1"}, "tiny_gpt": {"TOKENS": "2"},
            "decode_kv_cache": {"TOKENS": "3"}, "serve": {"NOOPT": "1", "CACHE": "int8"},
            "llm_chat": {"MODEL": "latent", "LAYERS": "1", "TOKENS": "3", "QUESTIONS": "1", "NOOPT": "1"}}

@pytest.mark.parametrize("name", SAYS)
def test_example(name:str) -> None:
  result = run(name, **SETTINGS.get(name, {}))
  assert result.returncode == 0, result.stderr
  for pattern in SAYS[name]: assert re.search(pattern, result.stdout, re.MULTILINE), (pattern, result.stdout)

def test_source_for_another_chip() -> None:
  result = run("show_hip_source", "gfx1201")
  assert result.returncode == 0 and "__builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(" in result.stdout

@pytest.mark.thorough
@pytest.mark.parametrize("device", ["EMU::gfx942", "EMU::gfx1100", "EMU::sm_80"])
@pytest.mark.parametrize("model", ["grouped", "latent", "hybrid"])
def test_two_questions_to_a_model(model:str, device:str) -> None:
  result = run("llm_chat", MODEL=model, DEV=device, NOOPT="1")
  assert result.returncode == 0 and re.search(rf"^{model} on EMU: \d+ tokens .*: [1-9]\d* calls\)", result.stdout, re.MULTILINE), result.stderr

@pytest.mark.thorough
def test_a_long_training() -> None:
  result = run("train_gpt")
  assert result.returncode == 0 and "50 steps, the loss curves" in result.stdout, result.stderr

@pytest.mark.thorough
def test_gradients_of_a_long_context() -> None:
  result = run("long_context", S="61")
  assert result.returncode == 0 and "dwk largest difference" in result.stdout, result.stderr
