"""nibble for Conan 2: `conan create packaging/conan`, with the CUDA kernels `-o "nibble/*:cuda=True"`.

Projects find what they find without Conan: find_package(nibble), nibble::nibble (the C++ interface) and nibble::shared (the C interface).
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class Nibble(ConanFile):
    name = "nibble"
    description = "4-bit and 8-bit quantized linear layers at the speed of the hardware"
    license = "Apache-2.0"
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"cuda": [True, False]}
    default_options = {"cuda": False}

    def set_version(self):
        self.version = re.search(r"project\(nibble VERSION ([0-9.]+)", load(self, os.path.join(SOURCE, "CMakeLists.txt")))[1]

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "integrations/*", "src/*"):
            copy(self, pattern, SOURCE, self.export_sources_folder)

    def requirements(self):
        self.requires("fmt/[>=9 <13]")
        self.requires("nlohmann_json/[>=3.10 <4]", visible=False)

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"nibble runs under Linux, not {self.settings.os}")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables.update({"NIBBLE_BUILD_TOOLS": False, "NIBBLE_BUILD_TESTS": False, "NIBBLE_WERROR": False})
        toolchain.cache_variables["NIBBLE_CUDA"] = bool(self.options.cuda)
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):  # nibble's own nibbleConfig.cmake is the description
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/nibble"]
