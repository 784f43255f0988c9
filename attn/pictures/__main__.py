"""`python -m attn.pictures [FOLDER]` draws every picture into FOLDER, by default docs/pictures. `python -m attn.pictures map` draws which tiles a
kernel skips for a caller's own mask function (attn/pictures/tile_map.py)."""
from __future__ import annotations
import argparse, sys
from pathlib import Path
from attn.pictures import functions, key_ranges, matrices, shared_memory, tile_map, zigzag

def pictures() -> dict[str, str]:
  """Returns the SVG text of each picture, by file name."""
  found = {**matrices.of_instructions(), **key_ranges.of_key_ranges(), **shared_memory.of_shared_memory(), **zigzag.of_zigzag(),
           **functions.of_functions(), **tile_map.of_tile_map()}
  return {f"{name}.svg": drawing.svg() for name, drawing in found.items()}

def main(arguments:list[str]|None=None) -> int:
  arguments = sys.argv[1:] if arguments is None else arguments
  if arguments[:1] == ["map"]: return tile_map.map_command(arguments[1:])
  description = "Draws the pictures of docs/algorithm.md, docs/sharding.md and docs/functions.md from the kernels' own tables and functions. " \
                "`map FUNCTION` in place of a folder draws the map of a mask: see map --help."
  parser = argparse.ArgumentParser("python -m attn.pictures", description=description)
  parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/pictures"), help="folder for the pictures, by default docs/pictures")
  folder = parser.parse_args(arguments).folder
  if not folder.is_dir(): parser.error(f"{folder} is not a folder: give one, or run the command at the root of the repository")
  for name, text in pictures().items(): (folder/name).write_text(text, encoding="utf-8")
  return 0

if __name__ == "__main__": sys.exit(main())
