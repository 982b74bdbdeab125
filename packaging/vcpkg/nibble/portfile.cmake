# nibble for vcpkg, from the tree that this port is in: vcpkg install nibble --overlay-ports=packaging/vcpkg
set(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../..")
cmake_path(NORMAL_PATH SOURCE_PATH)
string(COMPARE EQUAL "${VCPKG_LIBRARY_LINKAGE}" "dynamic" shared)  # the C interface; the C++ interface is an archive always
vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES cuda NIBBLE_CUDA)
vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS ${features} -DNIBBLE_BUILD_SHARED=${shared} -DNIBBLE_BUILD_TESTS=OFF -DNIBBLE_BUILD_TOOLS=OFF -DNIBBLE_WERROR=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/nibble)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
