"""Settings of the emulator from environment variables."""
from __future__ import annotations
import os

WORDS = {"0": False, "false": False, "off": False, "no": False, "1": True, "true": True, "on": True, "yes": True}

def switch(name:str, default:bool) -> bool:
  """Tells whether the environment variable `name` is on. Returns `default` if it is not set."""
  if not (text := os.environ.get(name, "")): return default
  if text.lower() not in WORDS: raise ValueError(f"{name}={text!r}: must be one of {', '.join(WORDS)}")
  return WORDS[text.lower()]

def number_of_switch(name:str) -> int:
  """Returns the environment variable `name` as a number, or 0 if it is not set."""
  text = os.environ.get(name, "") or "0"
  if not text.isdecimal(): raise ValueError(f"{name}={text!r}: must be a whole number from 0 on")
  return int(text)
