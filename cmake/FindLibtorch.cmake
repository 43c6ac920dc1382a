# SPDX-License-Identifier: Apache-2.0
# Finds libtorch inside a torch wheel or a libtorch archive. Defines these targets:
#
#   weft::libtorch        headers, libtorch_cpu and libc10
#   weft::libtorch_cuda   the same and libtorch_cuda, if the wheel has it and there is a CUDA
#                         toolkit. For programs that use the CUDA part of libtorch themselves: tests
#                         and benches. No library of Weft links it.
#
# It does not use find_package(Torch), which requires a whole CUDA toolkit if the wheel was built
# with CUDA, and links libtorch_cuda into everything, which costs each process 0.2 s and 350 MiB at
# start. Weft opens libtorch_cuda at run time if there is a GPU (engine/tensor/torch_cuda.h). A
# program may use both: the libraries are the same files.
#
# Input: WEFT_TORCH_ROOT, or Torch_DIR, or a torch folder on CMAKE_PREFIX_PATH, or the python3 on
# PATH that can import torch.

set(hints ${WEFT_TORCH_ROOT})
if(Torch_DIR)
  list(APPEND hints "${Torch_DIR}/../../..")
endif()
find_path(Libtorch_INCLUDE_DIR torch/csrc/distributed/c10d/Store.hpp HINTS ${hints} PATH_SUFFIXES include)
set(interpreter "${Python3_EXECUTABLE}")
if(NOT Libtorch_INCLUDE_DIR AND NOT interpreter)
  find_program(Libtorch_PYTHON python3)
  mark_as_advanced(Libtorch_PYTHON)
  set(interpreter "${Libtorch_PYTHON}")
endif()
if(NOT Libtorch_INCLUDE_DIR AND interpreter)
  execute_process(
    COMMAND ${interpreter} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(Libtorch_INCLUDE_DIR torch/csrc/distributed/c10d/Store.hpp HINTS ${python_torch} PATH_SUFFIXES include)
endif()
get_filename_component(Libtorch_ROOT "${Libtorch_INCLUDE_DIR}" DIRECTORY)
find_library(Libtorch_CPU_LIBRARY torch_cpu HINTS ${Libtorch_ROOT}/lib NO_DEFAULT_PATH)
find_library(Libtorch_C10_LIBRARY c10 HINTS ${Libtorch_ROOT}/lib NO_DEFAULT_PATH)
find_library(Libtorch_CUDA_LIBRARY torch_cuda HINTS ${Libtorch_ROOT}/lib NO_DEFAULT_PATH)
find_library(Libtorch_C10_CUDA_LIBRARY c10_cuda HINTS ${Libtorch_ROOT}/lib NO_DEFAULT_PATH)
mark_as_advanced(Libtorch_INCLUDE_DIR Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY Libtorch_CUDA_LIBRARY Libtorch_C10_CUDA_LIBRARY)

if(Libtorch_INCLUDE_DIR)
  file(STRINGS "${Libtorch_INCLUDE_DIR}/torch/headeronly/version.h" version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" Libtorch_VERSION "${version_lines}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY Libtorch_INCLUDE_DIR VERSION_VAR Libtorch_VERSION)

# The releases whose headers Weft compiles with. engine/tensor/torch_releases.h handles the
# differences between them.
set(Libtorch_OLDEST 2.11)
set(Libtorch_NEWEST 2.15)
if(Libtorch_FOUND AND Libtorch_VERSION VERSION_LESS Libtorch_OLDEST)
  message(FATAL_ERROR "libtorch ${Libtorch_VERSION} in ${Libtorch_ROOT} is too old: Weft needs ${Libtorch_OLDEST} or newer "
    "(tested with ${Libtorch_OLDEST} to ${Libtorch_NEWEST}). Give -DWEFT_TORCH_ROOT=<folder of a newer torch wheel or libtorch archive>.")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" Libtorch_MINOR_RELEASE "${Libtorch_VERSION}")
if(Libtorch_FOUND AND Libtorch_MINOR_RELEASE VERSION_GREATER Libtorch_NEWEST)
  message(WARNING "libtorch ${Libtorch_VERSION} is newer than those that Weft is tested with (${Libtorch_OLDEST} to "
    "${Libtorch_NEWEST}). If it does not compile or its tests fail, give -DWEFT_TORCH_ROOT=<folder of one of these>.")
endif()

# libtorch's functions take std::string and std::list, of which libstdc++ has two layouts and libc++
# a third. A program with another layout than libtorch's does not link, or misbehaves.
if(Libtorch_FOUND)
  file(STRINGS "${Libtorch_C10_LIBRARY}" cxx11_symbols REGEX "_ZN3c10.*__cxx11" LIMIT_COUNT 1)
  if(NOT cxx11_symbols)
    message(FATAL_ERROR "the libtorch in ${Libtorch_ROOT} was built with another C++ ABI (libstdc++'s before C++11, or libc++); Weft "
      "needs libstdc++'s C++11 ABI, which all torch wheels since 2.7 have, and the libtorch archives named cxx11-abi.")
  endif()
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_QUIET TRUE)
  check_cxx_source_compiles("#include <string>\n#if !defined(_GLIBCXX_USE_CXX11_ABI) || !_GLIBCXX_USE_CXX11_ABI\n#error another ABI\n#endif\nint main() {}"
    WEFT_HAS_LIBTORCH_ABI)
  unset(CMAKE_REQUIRED_QUIET)
  if(NOT WEFT_HAS_LIBTORCH_ABI)
    message(FATAL_ERROR "this compiler, with these flags, uses another C++ ABI than libtorch, which has libstdc++'s C++11 ABI: "
      "remove -D_GLIBCXX_USE_CXX11_ABI=0 or -stdlib=libc++ from the flags, and this build folder's CMakeCache.txt.")
  endif()
endif()

set(Libtorch_HAS_GLOO FALSE)
if(EXISTS "${Libtorch_INCLUDE_DIR}/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp")
  set(Libtorch_HAS_GLOO TRUE)
endif()

if(Libtorch_FOUND AND NOT TARGET weft::libtorch)
  add_library(weft::libtorch_c10 SHARED IMPORTED)
  set_target_properties(weft::libtorch_c10 PROPERTIES IMPORTED_LOCATION "${Libtorch_C10_LIBRARY}")
  add_library(weft::libtorch_cpu SHARED IMPORTED)
  set_target_properties(weft::libtorch_cpu PROPERTIES IMPORTED_LOCATION "${Libtorch_CPU_LIBRARY}")
  add_library(weft::libtorch INTERFACE IMPORTED)
  target_include_directories(weft::libtorch SYSTEM INTERFACE
    "${Libtorch_INCLUDE_DIR}" "${Libtorch_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(weft::libtorch INTERFACE weft::libtorch_cpu weft::libtorch_c10)
  if(Libtorch_CUDA_LIBRARY AND Libtorch_C10_CUDA_LIBRARY AND TARGET CUDA::cudart)
    add_library(weft::libtorch_cuda INTERFACE IMPORTED)
    # libtorch_cuda finds its own dependencies when it is loaded.
    target_link_options(weft::libtorch_cuda INTERFACE LINKER:--allow-shlib-undefined)
    target_link_libraries(weft::libtorch_cuda INTERFACE
      "${Libtorch_CUDA_LIBRARY}" "${Libtorch_C10_CUDA_LIBRARY}" weft::libtorch CUDA::cudart)
  endif()
endif()
