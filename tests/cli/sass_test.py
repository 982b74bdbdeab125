"""bench/sass.py on listings of machine code: usage: sass_test.py SASS_PY"""

import importlib.util
import sys

spec = importlib.util.spec_from_file_location("sass", sys.argv[1])
sass = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sass)

# Of a kernel that ptxas compiled so: loads that set scoreboards 2 and 3, and an arrival that waits for none.
WAIT = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R14+URZ], R13", 0x000E64000800017F)
LOADS = [("LDS.64 R26, [R105+0x1c0]", 0x000EA20000000A00), ("LDS.64 R28, [R105+0x1e0]", 0x000EE20000000A00)]
ARRIVAL = ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R30+URZ], RZ", 0x0009E2000810003F)
EXPECT = ("SYNCS.ARRIVE.TRANS64 RZ, [R30+URZ], R2", 0x0009E2000810003F)


def waits_for(*scoreboards):
    return ("FMUL R34, R27, R187", 0x000FE20000400000 | sum(1 << 52 + s for s in scoreboards))


assert sass.overtaken([WAIT, *LOADS, ARRIVAL]) == LOADS[0][0]
assert sass.overtaken([WAIT, *LOADS, waits_for(2), ARRIVAL]) == LOADS[1][0]
assert sass.overtaken([WAIT, *LOADS, waits_for(2, 3), ARRIVAL]) is None
assert sass.overtaken([WAIT, *LOADS, ("DEPBAR.LE SB2, 0x0", 0x000FE20000000000), waits_for(3), ARRIVAL]) is None
assert sass.overtaken([WAIT, ARRIVAL, *LOADS, WAIT, ARRIVAL]) is None  # the next stage
assert sass.overtaken([WAIT, *LOADS, EXPECT]) is None  # a producer's, which reads nothing

LISTING = "\n".join(["arch = sm_90a", "\t\tFunction : early"] + [
    line for i, (text, upper) in enumerate([WAIT, *LOADS, ARRIVAL])
    for line in (f"        /*{16 * i:04x}*/                   {text} ;    /* 0x00000a00ff017b82 */", f"{'':60}/* 0x{upper:016x} */")])
LISTING += "\n" + LISTING.replace("arch = sm_90a", "arch = sm_80").replace("early", "other")
sass.disassemble = lambda path: LISTING
sass.binaries = lambda path: [path]
assert sass.releases("a") == {("sm_90a", "early"): LOADS[0][0]}, sass.releases("a")
