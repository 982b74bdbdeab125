#!/usr/bin/env python3
"""The Debian packages: made, listed, unpacked and used.

usage: package_test.py CPACK BUILD SOURCE COMPILER; exits with 77, skipped, where there is no dpkg.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HAS = {
    "libnibble1": {"usr/lib/libnibble.so.1", r"usr/lib/libnibble\.so\.1\.\d+"},
    "libnibble-dev": {"usr/include/nibble/nibble.h", "usr/include/nibble/nibble.hpp", "usr/include/nibble/version.hpp",
                      "usr/lib/libnibble.so", "usr/lib/libnibble.a", "usr/lib/cmake/nibble/nibbleConfig.cmake",
                      "usr/lib/cmake/nibble/nibbleConfigVersion.cmake", "usr/lib/cmake/nibble/nibbleTargets.cmake",
                      "usr/lib/cmake/nibble/nibbleSharedTargets.cmake", "usr/lib/pkgconfig/nibble.pc",
                      "usr/lib/pkgconfig/nibble-static.pc"},
    "nibble-tools": {"usr/bin/nibble", "usr/share/man/man1/nibble.1.gz", "usr/share/bash-completion/completions/nibble",
                     "usr/share/zsh/vendor-completions/_nibble", "usr/share/fish/vendor_completions.d/nibble.fish"},
}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check(package, deb):
    files = [line.split()[5][2:] for line in run("dpkg-deb", "-c", deb).splitlines() if not line.startswith("d")]
    for pattern in HAS[package] | {f"usr/share/doc/{package}/{name}" for name in ("copyright", "changelog.gz")}:
        if not any(re.fullmatch(pattern, file) for file in files):
            sys.exit(f"{package} has no {pattern}:\n" + "\n".join(files))
    for other in HAS.keys() - {package}:  # nothing is in two packages
        twice = [file for file in files if any(re.fullmatch(pattern, file) for pattern in HAS[other])]
        if twice:
            sys.exit(f"{package} has {twice}, which is {other}'s")
    depends = run("dpkg-deb", "-f", deb, "Depends")
    for wanted in ["libnibble1 (=", "libfmt-dev"] if package == "libnibble-dev" else ["libc6 (>=", "libstdc++6", "libfmt"]:
        if wanted not in depends:
            sys.exit(f"{package} does not depend on {wanted}: {depends}")


def main():
    cpack, build, source, compiler = sys.argv[1:]
    if not all(map(shutil.which, ("dpkg-deb", "dpkg-shlibdeps", "file"))):
        sys.exit(77)
    with tempfile.TemporaryDirectory() as work:
        run(cpack, "-G", "DEB", "-B", f"{work}/packages", cwd=build)
        debs = {deb.name.split("_")[0]: deb for deb in pathlib.Path(work, "packages").glob("*.deb")}
        if debs.keys() != HAS.keys():
            sys.exit(f"the packages are {sorted(debs)}, expected {sorted(HAS)}")
        root = pathlib.Path(work, "root")
        for package, deb in debs.items():
            check(package, deb)
            run("dpkg-deb", "-x", deb, root)

        library = f"{root}/usr/lib"
        here = {**os.environ, "LD_LIBRARY_PATH": library, "PKG_CONFIG_PATH": f"{library}/pkgconfig"}
        print(run(f"{root}/usr/bin/nibble", "--version", env=here).strip())
        flags = ["-I", f"{root}/usr/include", "-L", library, "-lnibble"]
        if shutil.which("pkg-config"):
            flags = run("pkg-config", "--cflags", "--libs", "nibble", env=here).split()
        run(compiler, "-std=c11", "-o", f"{work}/quickstart", f"{source}/examples/quickstart.c", *flags, "-lm")
        print(run(f"{work}/quickstart", env=here).strip())


main()
