"""8-bit formats in numpy, written without attn's own code: the number that each byte stands for, and rounding of rows to a format."""
from __future__ import annotations
import math
import numpy as np

MOST = {"int8": 127.0, "fp8e4m3": 448.0, "fp8e4m3fnuz": 240.0}     # largest numbers of the formats

def numbers_of(name:str) -> np.ndarray:
  # Returns the number that each of the 256 bytes stands for, by the definition of the format `name`.
  byte = np.arange(256)
  if name == "int8": return byte.astype(np.uint8).view(np.int8).astype(np.float64)
  bias, exponent, mantissa = {"fp8e4m3": 7, "fp8e4m3fnuz": 8}[name], byte >> 3 & 15, byte & 7
  size = np.where(exponent == 0, mantissa/8*2.0**(1 - bias), (1 + mantissa/8)*2.0**(exponent - bias))
  found = np.where(byte < 128, size, -size)
  found[[0x7f, 0xff] if name == "fp8e4m3" else [0x80]] = math.nan
  return found

def nearest(name:str, x:np.ndarray) -> np.ndarray:
  # Returns the number of the format `name` that is nearest to each x; of two equally near ones the one with the even byte.
  numbers = numbers_of(name)
  there = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) <= MOST[name]) & ((np.arange(256) != 0x80) | (name == "int8")))
  distance = np.abs(np.clip(x.astype(np.float64), -1e4, 1e4)[:, None] - numbers[there])
  best = distance == distance.min(1, keepdims=True)
  return numbers[there[np.argmax(best*(1 + (there % 2 == 0)), 1)]]

def scales_of(name:str, x:np.ndarray, dtype:str="float32") -> np.ndarray:
  # Returns the scale of each row of x: its largest absolute value divided by the largest number of the 8-bit format `name`.
  # A row is the last axis. A row with NaN or inf has the scale NaN.
  largest = np.abs(x.astype(np.float64)).max(-1)
  return np.where(np.isfinite(largest), largest/MOST[name], math.nan).astype(dtype)

def rounded_rows(name:str, x:np.ndarray, scales:np.ndarray) -> np.ndarray:
  # Divides rows by their scales, and rounds the quotients to the nearest numbers of the 8-bit format `name`.
  with np.errstate(invalid="ignore", divide="ignore"): ratio = np.where(scales[..., None] > 0, x/scales.astype(np.float64)[..., None], 0)
  return nearest(name, ratio.ravel()).reshape(x.shape)
