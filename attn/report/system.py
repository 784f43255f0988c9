"""Facts about a card that the operating system gives: name, driver, clocks and power, from sysfs for amdgpu and from nvidia-smi for NVIDIA."""
from __future__ import annotations
import contextlib, getpass, importlib.metadata, json, platform, re, shutil, socket, statistics, subprocess, threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from attn.chips import Card, Chip
from attn.compilers.choice import in_use
from attn.report.schema import CardText, SensorReading, SoftwareText
from attn.tinygrad_compat import TINYGRAD_VERSION, card_facts, device_of

# serial numbers, and other numbers of an individual card, are never read
SYS, ROOT = Path("/sys"), Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.05     # between two readings of the sensors

Sensors = Callable[[], SensorReading|None]     # reads the sensors of a card, as far as the system tells them

# ***** texts without names *****

def without_names(text:str) -> str:
  """Returns a text without what names a machine or a person: folders of file paths, the host's name and the user's name."""
  text = re.sub(r"(?<![\w/])(?:~|\.\.?)?(?:/[\w.+@-]+)+/", "", text)
  host = socket.gethostname()
  try: user = getpass.getuser()
  except (KeyError, OSError): user = ""
  for name in {host, host.split(".")[0], user} - {""}: text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
  return text

def first_line(e:BaseException) -> str: return without_names(f"{type(e).__name__}: {str(e).strip()}".splitlines()[0])

# ***** software *****

def commit_of_attn() -> str|None:
  """Returns the commit of attn, with ", changed" if files differ from it; None if attn does not come from a clone."""
  def git(*words:str) -> str|None:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done is not None and done.returncode == 0 else None
  if (ROOT/".git").exists() and (found := git("rev-parse", "HEAD")):
    return found[:12] + ", changed"*bool(git("status", "--porcelain", "--untracked-files=no"))
  try: told = importlib.metadata.distribution("attn").read_text("direct_url.json")
  except importlib.metadata.PackageNotFoundError: return None
  return str(json.loads(told or "{}").get("vcs_info", {}).get("commit_id", ""))[:12] or None

def attn_version() -> str:
  """Returns attn's version, from the installed package or from pyproject.toml of a clone."""
  try: return importlib.metadata.version("attn")
  except importlib.metadata.PackageNotFoundError:
    found = re.search(r'^version = "(.*)"$', (ROOT/"pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found is not None else "unknown"

def version_numbers(version:str) -> str:
  """Returns the numbers at the beginning of a version text, without suffixes of a build."""
  found = re.match(r"\d+(\.\d+)*", version)
  return found[0] if found is not None else "unknown"

def software(device:str, arch:Chip) -> SoftwareText:
  kind = device.split(":")[0]
  if kind == "AMD": compiler = in_use(arch.name)
  else: compiler = "none" if kind == "EMU" else type(device_of(device).renderer.compiler).__name__
  return SoftwareText(attn_version(), commit_of_attn(), TINYGRAD_VERSION, version_numbers(platform.python_version()), without_names(compiler),
                      f"{platform.system()} {version_numbers(platform.release())}")

# ***** the card *****

@dataclass(frozen=True)
class FoundCard:
  """Card of a device: its description for a report, and the cards of attn/chips that it may be."""
  text: CardText
  may_be: tuple[Card, ...]
  # reads the card's sensors
  sensors: Sensors

def find_card(device:str, arch:Chip, name:str|None=None) -> FoundCard:
  """Finds the card of a device, for a report; `name` may give the card's name in attn's table of cards."""
  kind, facts = device.split(":")[0], card_facts(device)
  known = {card.name: card for card in arch.cards}
  if name is not None and name not in known: raise ValueError(f"--card {name!r}: the cards with {arch.name} are {', '.join(known)}")
  folder = SYS/f"class/drm/renderD{facts.render_minor}/device" if facts.render_minor is not None else None
  told = facts.name or (text_of_file(folder/"product_name") if folder is not None else None)
  fitting = [card for card in arch.cards if card.cus == facts.compute_units]
  # without a name the number of compute units decides; on Instinct cards the name in the driver, too
  may_be = [known[name]] if name is not None else [card for card in fitting if card.name in (told or "")] or fitting
  if kind == "EMU": may_be = [card for card in arch.cards if card.cus and card.ghz] if name is None else may_be
  if folder is not None: sensors = amd_sensors(folder)
  else: sensors = nvidia_sensors(facts.pci) if kind == "CUDA" and facts.pci else no_sensors
  if kind == "AMD": driver = amdgpu_driver()
  elif kind == "CUDA": driver = nvidia_driver(facts.driver)
  else: driver = "none" if kind == "EMU" else "unknown"
  called = "emulated" if kind == "EMU" else told or " or ".join(card.name for card in may_be) or arch.name
  return FoundCard(CardText(kind, arch.name, without_names(called), facts.compute_units, without_names(driver)), tuple(may_be), sensors)

def amdgpu_driver() -> str:
  """Returns the version of the driver amdgpu, or of Linux if amdgpu is a part of the kernel."""
  version = text_of_file(SYS/"module/amdgpu/version")
  if version is not None: return f"amdgpu {version_numbers(version)}"
  return f"amdgpu of Linux {version_numbers(platform.release())}" if (SYS/"module/amdgpu").exists() else "tinygrad's own"

def text_of_file(path:Path) -> str|None:
  try: return path.read_text().strip() or None
  except (OSError, UnicodeDecodeError): return None

# ***** sensors *****

def no_sensors() -> SensorReading|None: return None

def amd_sensors(folder:Path) -> Sensors:
  """Returns a function that reads the sensors of an AMD card: the files of hwmon."""
  def number(pattern:str, unit:float) -> float|None:
    for path in sorted(folder.glob(pattern)):
      if (text := text_of_file(path)) is not None and re.fullmatch(r"-?\d+", text): return int(text)/unit
    return None
  # clocks that hwmon does not have: pp_dpm_sclk (core) and pp_dpm_mclk (memory)
  def level(name:str) -> float|None:
    found = re.search(r"(\d+)Mhz \*", text_of_file(folder/name) or "")
    return float(found[1]) if found is not None else None
  def either(a:float|None, b:float|None) -> float|None: return a if a is not None else b
  def read() -> SensorReading|None:
    return reading_or_none(SensorReading(
      core_mhz=either(number("hwmon/*/freq1_input", 1e6), level("pp_dpm_sclk")),
      memory_mhz=either(number("hwmon/*/freq2_input", 1e6), level("pp_dpm_mclk")),
      watts=either(number("hwmon/*/power1_average", 1e6), number("hwmon/*/power1_input", 1e6)),
      celsius=number("hwmon/*/temp1_input", 1e3)))
  return read

def nvidia_smi(what:str, *words:str) -> list[str]:
  """Returns the comma-separated values `what` that nvidia-smi prints; none if nvidia-smi is missing or fails."""
  command = ["nvidia-smi", *words, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
  try: done = subprocess.run(command, capture_output=True, text=True, timeout=10)
  except (OSError, subprocess.TimeoutExpired): return []
  return [x.strip() for x in done.stdout.strip().split("\n")[0].split(",")] if done.returncode == 0 else []

def nvidia_driver(cuda:str|None) -> str:
  found = nvidia_smi("driver_version")
  return ", ".join([f"NVIDIA {version_numbers(x)}" for x in found[:1]] + [cuda or "CUDA of unknown version"])

def nvidia_sensors(pci:str) -> Sensors:
  """Returns a function that asks nvidia-smi for the clocks, power and temperature of the card at a PCI address."""
  def number(text:str) -> float|None:
    try: return float(text)
    except ValueError: return None     # [N/A]
  def read() -> SensorReading|None:
    values = [number(x) for x in nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu", "-i", pci)]
    return reading_or_none(SensorReading(*values)) if len(values) == len(fields(SensorReading)) else None
  return read

def reading_or_none(x:SensorReading) -> SensorReading|None:
  """Returns the sensor reading, or None if none of its fields has a value."""
  return x if any(getattr(x, f.name) is not None for f in fields(x)) else None

def median_reading(readings:Sequence[SensorReading]) -> SensorReading|None:
  """Returns the median of each sensor over several readings."""
  def median(name:str) -> float|None:
    found = [x for reading in readings if (x := getattr(reading, name)) is not None]
    return statistics.median(found) if found else None
  return reading_or_none(SensorReading(**{f.name: median(f.name) for f in fields(SensorReading)}))

@contextlib.contextmanager
def sampled(sensors:Sensors) -> Iterator[list[SensorReading]]:
  """Context in which a thread reads the sensors again and again. Yields the list of readings."""
  found, over = list[SensorReading](), threading.Event()
  def sample() -> None:
    while not over.wait(SAMPLE_SECONDS):
      if (reading := sensors()) is None: return
      found.append(reading)
  thread = threading.Thread(target=sample, daemon=True)
  thread.start()
  try: yield found
  finally:
    over.set()
    thread.join()
    # at least one reading, if the driver gives any
    if not found and (last := sensors()) is not None: found.append(last)
