// A source for the target that precompiles the tests' headers; see CMakeLists.txt.
