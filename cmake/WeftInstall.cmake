# SPDX-License-Identifier: Apache-2.0
# cmake --install installs the library, the headers and the programs, so that a user's
# find_package(weft) provides the target weft::weft. The folder may be moved, because neither the
# library nor CMake's files contain its path.
include(CMakePackageConfigHelpers)

# For ./dev install: builds what is installed, without tests and examples.
add_custom_target(installed)

set(programs weft-run weft-agent weft-info weft-debug weft-timeline)
add_dependencies(installed weft ${programs})
install(TARGETS weft EXPORT weft LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# The programs find the libtorch that they were built with; so does libweft.so if the user's program
# has not loaded one.
cmake_path(GET Libtorch_CPU_LIBRARY PARENT_PATH folder)
set_target_properties(weft weft-agent weft-info PROPERTIES INSTALL_RPATH "${folder}")
install(TARGETS ${programs} DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT weft NAMESPACE weft:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft FILE weftTargets.cmake)
configure_package_config_file(cmake/weftConfig.cmake.in "${PROJECT_BINARY_DIR}/weftConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/weftConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/weftConfig.cmake" "${PROJECT_BINARY_DIR}/weftConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake" DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
# The public headers, and the headers of the tree that they include.
install(CODE "
set(source \"${PROJECT_SOURCE_DIR}\")
set(destination \"${CMAKE_INSTALL_INCLUDEDIR}\")
include(\"${PROJECT_SOURCE_DIR}/cmake/install_headers.cmake\")")

# An archive and a Debian package of the same files (docs/packaging.md): cpack --config
# build/<preset>/CPackConfig.cmake -G TGZ, or DEB.
if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_PACKAGE_NAME weft)
  set(CPACK_PACKAGE_VENDOR Weft)
  set(CPACK_PACKAGE_CONTACT "the maintainers of Weft")
  set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}+torch${Libtorch_MINOR_RELEASE}")
  set(CPACK_GENERATOR TGZ DEB)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
  set(CPACK_PACKAGE_DIRECTORY "${PROJECT_BINARY_DIR}/packages")
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_PACKAGE_DEPENDS libmsgpack-cxx-dev)  # for Weft's headers
  # libtorch is in no package of Debian's that Weft could depend on.
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${folder}")
  include(CPack)
endif()
