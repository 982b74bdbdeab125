#!/usr/bin/env python3
"""The man page and the completions know every command and option that --help knows, and shells accept them.

usage: generate_test.py NIBBLE
"""
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

NIBBLE = sys.argv.pop(1)


def nibble(*arguments):
    return subprocess.run([NIBBLE, *arguments], check=True, capture_output=True, text=True).stdout


def options(help_text):
    """[["-h", "--help"], ...] of a help text, and what each takes."""
    lines = help_text[help_text.index("Options:"):].split("\n\n")[0]
    return [match.group(1).split(",") for match in re.finditer(r"^  (-[\w,-]+)", lines, re.M)]


COMMANDS = re.findall(r"^  (\w+) ", nibble("--help").split("Subcommands:")[1], re.M)
OPTIONS = {command: options(nibble(command, "--help")) for command in COMMANDS}
BASH = nibble("generate", "bash")


def complete(*words):
    """What bash offers for the last word."""
    script = BASH + "\nCOMP_WORDS=(\"$@\")\nCOMP_CWORD=$(($# - 1))\ncompopt() { :; }\n_nibble\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    output = subprocess.run(["bash", "-c", script, "bash", *words], check=True, capture_output=True, text=True).stdout
    return output.split()


class Generate(unittest.TestCase):
    def test_there_is_something_to_find(self):
        self.assertIn("quantize", COMMANDS)
        self.assertIn(["--format"], OPTIONS["quantize"])
        self.assertNotIn("generate", COMMANDS)

    def test_bash(self):
        self.assertEqual(set(complete("nibble", "")) - {"-h", "--help", "--version"}, set(COMMANDS))
        self.assertEqual(complete("nibble", "ver"), ["verify"])
        for command in COMMANDS:
            self.assertEqual(complete("nibble", command, "-"), sum(OPTIONS[command], []))
        self.assertEqual(complete("nibble", "quantize", "in", "out", "--clip"), ["--clip-search"])
        self.assertIn("awq", complete("nibble", "quantize", "in", "out", "--format", ""))
        self.assertEqual(complete("nibble", "bench", "--backend", "cu"), ["cuda"])
        self.assertEqual(complete("nibble", "bench", "--json", "x"), [])  # a file: bash's own business
        self.assertEqual(complete("nibble", "bench", "--report", "x"), [])
        self.assertEqual(complete("nibble", "bench", "x"), [])

    def test_other_shells(self):
        zsh, fish = nibble("generate", "zsh"), nibble("generate", "fish")
        for command in COMMANDS:
            self.assertIn(f"'{command}:", zsh)
            self.assertIn(f"-a {command} -d", fish)
            section = zsh[zsh.index(f"    {command})\n"):].split(" ;;\n")[0]
            lines = "\n".join(line for line in fish.splitlines() if f"_from {command}'" in line)
            for names in OPTIONS[command]:
                for name in names:
                    self.assertIn(f"'{name}[", section)
                    self.assertIn(f" -l {name[2:]} " if name.startswith("--") else f" -s {name[1:]} ", lines)

    def test_syntax(self):
        for shell in ("bash", "zsh", "fish"):
            if shutil.which(shell):
                with tempfile.NamedTemporaryFile("w") as script:
                    script.write(nibble("generate", shell))
                    script.flush()
                    subprocess.run([shell, "-n", script.name], check=True)

    def test_man(self):
        page = nibble("generate", "man")
        plain = page.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
        for command in COMMANDS:
            section = plain[plain.index(f".SS {command}\n"):].split("\n.SS ")[0]
            for names in OPTIONS[command]:
                self.assertIn("\n" + ", ".join(names), section)
        self.assertNotRegex(page, r"(?m)^\.(?!TH|SH|SS|TP|PP|B |nf|fi)")  # requests that were meant
        if shutil.which("man") and shutil.which("groff"):
            with tempfile.NamedTemporaryFile("w", suffix=".1") as file:
                file.write(page)
                file.flush()
                done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", file.name], check=True, capture_output=True,
                                      text=True)
                self.assertEqual(done.stderr, "")
                self.assertIn("--clip-search", done.stdout)


unittest.main()
