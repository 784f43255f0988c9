"""Stand-in for ROCm's compiler library libamd_comgr.so: the functions that tinygrad calls, written in C."""
import functools, subprocess, sys
from pathlib import Path

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t handle;
typedef struct { uint64_t size; char *bytes; } data;
typedef struct { data *item; } set;
typedef struct { char isa[128]; int actions; } info;

void amd_comgr_get_version(uint64_t *major, uint64_t *minor) { *major = MAJOR; *minor = 7; }
int amd_comgr_status_string(int status, const char **text) { *text = status == 2 ? "INVALID_ARGUMENT" : "ERROR"; return 0; }
int amd_comgr_create_action_info(handle *x) { *x = (handle)calloc(1, sizeof(info)); return 0; }
int amd_comgr_destroy_action_info(handle x) { return 0; }
int amd_comgr_action_info_set_language(handle x, int language) { return 0; }
int amd_comgr_action_info_set_logging(handle x, int on) { return 0; }
int amd_comgr_action_info_set_option_list(handle x, const char **options, size_t n) { return 0; }
int amd_comgr_action_info_set_isa_name(handle x, const char *name) { strncpy(((info *)x)->isa, strstr(name, "--") + 2, 127); return 0; }
int amd_comgr_create_data_set(handle *x) { *x = (handle)calloc(1, sizeof(set)); return 0; }
int amd_comgr_destroy_data_set(handle x) { return 0; }
int amd_comgr_create_data(int kind, handle *x) { *x = (handle)calloc(1, sizeof(data)); return 0; }
int amd_comgr_release_data(handle x) { return 0; }
int amd_comgr_set_data_name(handle x, const char *name) { return 0; }
int amd_comgr_set_data(handle x, uint64_t size, const char *bytes) {
  data *d = (data *)x;
  d->size = size; d->bytes = malloc(size); memcpy(d->bytes, bytes, size);
  return 0;
}
int amd_comgr_data_set_add(handle s, handle x) { ((set *)s)->item = (data *)x; return 0; }
int amd_comgr_action_data_get_data(handle s, int kind, uint64_t i, handle *x) { *x = (handle)((set *)s)->item; return *x ? 0 : 1; }
int amd_comgr_get_data(handle x, uint64_t *size, char *bytes) {
  data *d = (data *)x;
  if (bytes) memcpy(bytes, d->bytes, d->size); else *size = d->size;
  return 0;
}
int amd_comgr_do_action(int kind, handle x, handle in, handle out) {
  info *i = (info *)x;
  if (i->actions++ > 0) { ((set *)out)->item = ((set *)in)->item; return 0; }   /* code generation and linking: all was done at first */
  char from[] = "/tmp/stand_in_XXXXXX", to[] = "/tmp/stand_in_XXXXXX", command[1024];
  FILE *f = fdopen(mkstemp(from), "w");
  fwrite(((set *)in)->item->bytes, 1, ((set *)in)->item->size, f); fclose(f);
  f = fdopen(mkstemp(to), "r");
  snprintf(command, sizeof command, "sh %s %s < %s > %s 2>&1", SCRIPT, i->isa, from, to);
  int failed = system(command);
  data *d = calloc(1, sizeof(data));
  d->bytes = malloc(1 << 22); d->size = fread(d->bytes, 1, 1 << 22, f); fclose(f);
  remove(from); remove(to);
  ((set *)out)->item = d;
  return failed ? 1 : 0;
}
"""

@functools.cache
def build(folder:Path, name:str, script:str, major:int=2) -> str:
  # Builds a stand-in for comgr with the interface version `major`.7, which compiles by `script`. Returns its path.
  (folder/f"{name}.sh").write_text(script)
  (folder/f"{name}.c").write_text(SOURCE)
  subprocess.run([sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", "-w", f"-DMAJOR={major}", f'-DSCRIPT="{folder}/{name}.sh"',
                  "-o", folder/f"{name}.so", folder/f"{name}.c"], check=True)
  return str(folder/f"{name}.so")

# To compile, it runs a shell script with the source on stdin and the chip as $1. The output of the script is the code object, or the error log if
# the script fails. Tests select a stand-in by the environment variable COMGR_PATH, as users select a library.

VERSION = "AMD clang version {} (roc-test)"
def compiles(version:str) -> str:
  # Returns a compile script that accepts every source.
  # its "code object" is a text with the version, the chip and a checksum of the source
  return f'printf "\\177ELF\\000{VERSION.format(version)}\\000for %s: %s" "$1" "$(cksum)"\n'
def too_old(version:str) -> str:
  # Returns a compile script that rejects buffer descriptors, as LLVM 18 and older do.
  return f'if grep -q make_buffer_rsrc; then echo "x.hip:1:2: error: use of undeclared identifier"; exit 1; fi\n{compiles(version)}'
