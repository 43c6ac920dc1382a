# SPDX-License-Identifier: Apache-2.0
# Options: what to build, and with which dependencies. AUTO prints its choice; ON without the
# dependency is an error that says what to install.

option(WEFT_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(WEFT_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(WEFT_BUILD_BENCHES "Build the benches of profiling/bench" ${PROJECT_IS_TOP_LEVEL})
option(WEFT_SHARED "Build libweft.so, else libweft.a" ON)
option(WEFT_PYTHON "Build the Python package torch_weft, the backend of torch.distributed" OFF)
option(WEFT_STATIC_DEPENDENCIES "Link spdlog, fmt, libssl and libcrypto into Weft, so that other machines need not have them" OFF)
option(WEFT_WARNINGS_AS_ERRORS "Treat compiler warnings as errors" OFF)
set(WEFT_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them: address,undefined or thread")
option(WEFT_FUZZ "Build the fuzz targets for libFuzzer instead of as tests; needs clang++ (./dev fuzz)" OFF)
option(WEFT_UNITY "Compile several sources of the tests at a time" OFF)
set(WEFT_CUDA_ARCHITECTURES "80-real;90-real;100-real;90-virtual" CACHE STRING "GPU architectures of the kernels")
set(WEFT_TORCH_ROOT "" CACHE PATH "Folder of a torch wheel or libtorch (holds include/ and lib/)")

foreach(option CUDA NCCL GLOO VERBS MPI TRACE METRICS SYMBOLS)
  set(WEFT_${option} AUTO CACHE STRING "AUTO, ON or OFF")
  set_property(CACHE WEFT_${option} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${WEFT_${option}}" WEFT_${option})
  if(NOT WEFT_${option} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "WEFT_${option} is '${WEFT_${option}}'; it takes AUTO, ON or OFF")
  endif()
endforeach()

# weft_decide(<option> <found> <hint>): sets WEFT_<option> to ON or OFF, and WEFT_<option>_WHY to
# the reason.
function(weft_decide option found hint)
  if(WEFT_${option} STREQUAL "ON" AND NOT found)
    message(FATAL_ERROR "WEFT_${option}=ON, but it cannot be built here: ${hint}")
  endif()
  if(WEFT_${option} STREQUAL "OFF")
    set(choice OFF)
    set(why "switched off by WEFT_${option}=OFF")
  elseif(found)
    set(choice ON)
    set(why "found")
  else()
    set(choice OFF)
    set(why "${hint}")
  endif()
  message(STATUS "WEFT_${option}: ${choice} (${why})")
  set(WEFT_${option} ${choice} PARENT_SCOPE)
  set(WEFT_${option}_WHY "${why}" PARENT_SCOPE)
endfunction()

if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
  endif()
  # Full debug information doubles the time to compile a file that includes libtorch; line numbers
  # are enough for stack traces.
  string(REPLACE "-g" "-g1" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
endif()

find_program(WEFT_CCACHE ccache)
if(WEFT_CCACHE AND PROJECT_IS_TOP_LEVEL)
  # ccache's manual requires this sloppiness for precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros ${WEFT_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${WEFT_CCACHE})
endif()

# lld is much faster than GNU ld, and each test and example is a separate program.
find_program(WEFT_LLD ld.lld)
if(WEFT_LLD AND PROJECT_IS_TOP_LEVEL)
  add_link_options($<$<LINK_LANGUAGE:CXX>:-fuse-ld=lld>)
endif()

# --- CUDA: headers for the driver's types, and nvcc for the kernels. No CUDA library is linked:
# libcuda is opened at run time.
set(cuda_found FALSE)
set(cuda_hint "no nvcc of CUDA 13 found; ./dev --cuda pip installs one, or give -DCMAKE_CUDA_COMPILER")
if(NOT WEFT_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES ${WEFT_CUDA_ARCHITECTURES})
  if(CMAKE_CUDA_COMPILER)
    set(cuda_found TRUE)
  else()
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(cuda_found TRUE)
    endif()
  endif()
endif()
weft_decide(CUDA ${cuda_found} "${cuda_hint}")
if(WEFT_CUDA)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# --- NCCL: its header only. libnccl.so.2 is opened at run time and may be another release
# (transport/nccl/library.h).
set(nccl_found FALSE)
set(nccl_install "install the nvidia-nccl-cu13 wheel or libnccl-dev, of NCCL 2.28 or newer, and give -DNCCL_ROOT")
set(nccl_hint "it needs CUDA and nccl.h; ${nccl_install}")
if(WEFT_CUDA AND NOT WEFT_NCCL STREQUAL "OFF")
  find_path(WEFT_NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT}/include ${CUDAToolkit_INCLUDE_DIRS})
  if(WEFT_NCCL_INCLUDE_DIR)
    file(STRINGS "${WEFT_NCCL_INCLUDE_DIR}/nccl.h" nccl_lines REGEX "define NCCL_(MAJOR|MINOR) ")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" nccl_version "${nccl_lines}")
    if(nccl_version VERSION_GREATER_EQUAL 2.28)
      set(nccl_found TRUE)
    else()
      set(nccl_hint "${WEFT_NCCL_INCLUDE_DIR}/nccl.h is of NCCL ${nccl_version}, which is too old; ${nccl_install}")
      unset(WEFT_NCCL_INCLUDE_DIR CACHE)  # makes the next configure look again
    endif()
  endif()
endif()
weft_decide(NCCL ${nccl_found} "${nccl_hint}")
if(WEFT_NCCL)  # for the programs of the build tree
  cmake_path(SET nccl_libraries NORMALIZE "${WEFT_NCCL_INCLUDE_DIR}/../lib")
  list(APPEND CMAKE_BUILD_RPATH "${nccl_libraries}")
endif()

# --- MPI: Open MPI's headers only. libmpi.so.40 is opened at run time; other MPIs have different
# handles.
set(mpi_found FALSE)
if(NOT WEFT_MPI STREQUAL "OFF")
  find_path(WEFT_MPI_INCLUDE_DIR mpi-ext.h HINTS ${MPI_ROOT}/include
    PATH_SUFFIXES openmpi openmpi/include ${CMAKE_LIBRARY_ARCHITECTURE}/openmpi
    PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/openmpi/include /usr/lib/openmpi/include)
  if(WEFT_MPI_INCLUDE_DIR)
    file(STRINGS "${WEFT_MPI_INCLUDE_DIR}/mpi.h" mpi_version REGEX "define OMPI_MAJOR_VERSION [4-9]")
    if(mpi_version)
      set(mpi_found TRUE)
    endif()
  endif()
endif()
weft_decide(MPI ${mpi_found} "no mpi.h of Open MPI 4 or newer; install libopenmpi-dev, or give -DMPI_ROOT")

# --- libtorch
find_package(Libtorch)
if(NOT Libtorch_FOUND)
  message(FATAL_ERROR "no libtorch: give -DWEFT_TORCH_ROOT=<folder of the torch wheel>, or use ./dev build, which installs torch")
endif()
weft_decide(GLOO ${Libtorch_HAS_GLOO} "this libtorch was built without c10d's Gloo")

# --- RDMA: the header of libibverbs only. The library is opened at run time.
set(verbs_found FALSE)
if(NOT WEFT_VERBS STREQUAL "OFF")
  find_path(WEFT_VERBS_INCLUDE_DIR infiniband/verbs.h)
  if(WEFT_VERBS_INCLUDE_DIR)
    set(verbs_found TRUE)
  endif()
endif()
weft_decide(VERBS ${verbs_found} "no infiniband/verbs.h; install libibverbs-dev")

# --- Function names in the stacks of ranks that crash: libbacktrace, which Debian and Ubuntu ship
# with g++, and its demangler.
set(symbols_found FALSE)
if(NOT WEFT_SYMBOLS STREQUAL "OFF")
  foreach(what libbacktrace.a include)
    execute_process(COMMAND gcc -print-file-name=${what} OUTPUT_VARIABLE gcc_${what} OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endforeach()
  cmake_path(GET gcc_libbacktrace.a PARENT_PATH folder)
  find_path(WEFT_BACKTRACE_INCLUDE_DIR backtrace.h HINTS "${gcc_include}")
  find_library(WEFT_BACKTRACE NAMES libbacktrace.a backtrace HINTS "${folder}")
  find_path(WEFT_IBERTY_INCLUDE_DIR libiberty/demangle.h)
  find_library(WEFT_IBERTY NAMES libiberty.a iberty)
  mark_as_advanced(WEFT_BACKTRACE_INCLUDE_DIR WEFT_BACKTRACE WEFT_IBERTY_INCLUDE_DIR WEFT_IBERTY)
  if(WEFT_BACKTRACE_INCLUDE_DIR AND WEFT_BACKTRACE AND WEFT_IBERTY_INCLUDE_DIR AND WEFT_IBERTY)
    set(symbols_found TRUE)
    set(WEFT_STACK_LIBRARIES ${WEFT_BACKTRACE} ${WEFT_IBERTY})
  endif()
endif()
weft_decide(SYMBOLS ${symbols_found} "no libbacktrace (with g++ of Debian and Ubuntu) or no libiberty; install libiberty-dev")

# --- Metrics over HTTP
set(metrics_found FALSE)
if(NOT WEFT_METRICS STREQUAL "OFF")
  find_path(WEFT_PROMETHEUS_INCLUDE_DIR prometheus/exposer.h)
  find_library(WEFT_PROMETHEUS_CORE prometheus-cpp-core)
  find_library(WEFT_PROMETHEUS_PULL prometheus-cpp-pull)
  if(WEFT_PROMETHEUS_INCLUDE_DIR AND WEFT_PROMETHEUS_CORE AND WEFT_PROMETHEUS_PULL)
    set(metrics_found TRUE)
  endif()
endif()
weft_decide(METRICS ${metrics_found} "no prometheus/exposer.h; install prometheus-cpp-dev")

# --- Ranges: for the timeline and, if NVTX's headers are present, for NVIDIA's tools.
weft_decide(TRACE TRUE "")
set(WEFT_NVTX OFF)
if(WEFT_TRACE)
  # The torch wheel for CUDA brings nvidia-nvtx, which a build without a toolkit can use too.
  find_path(WEFT_NVTX_INCLUDE_DIR nvtx3/nvtx3.hpp
    HINTS ${CUDAToolkit_INCLUDE_DIRS} ${NVTX_ROOT}/include ${Libtorch_ROOT}/../nvidia/cu13/include)
  if(WEFT_NVTX_INCLUDE_DIR)
    set(WEFT_NVTX ON)
  else()
    message(STATUS "no nvtx3/nvtx3.hpp, so Nsight sees no ranges; it comes with the CUDA toolkit, and with torch's wheel for CUDA")
  endif()
endif()

find_package(Threads REQUIRED)
find_package(OpenSSL COMPONENTS Crypto SSL)
if(NOT OpenSSL_FOUND)
  message(FATAL_ERROR "OpenSSL's libcrypto or libssl is missing: install libssl-dev")
endif()
# WEFT_CRYPTO: libcrypto, for the libraries that sign or make checksums. WEFT_TLS: libssl, and
# libcrypto behind it.
set(WEFT_CRYPTO OpenSSL::Crypto)
set(WEFT_TLS OpenSSL::SSL OpenSSL::Crypto)
# WEFT_SPDLOG: what the sources with log lines link.
find_package(spdlog REQUIRED)
set(WEFT_SPDLOG spdlog::spdlog)
if(WEFT_STATIC_DEPENDENCIES)
  find_package(fmt REQUIRED)
  add_library(weft_spdlog INTERFACE)
  target_include_directories(weft_spdlog SYSTEM INTERFACE $<TARGET_PROPERTY:spdlog::spdlog_header_only,INTERFACE_INCLUDE_DIRECTORIES>)
  target_compile_definitions(weft_spdlog INTERFACE SPDLOG_FMT_EXTERNAL)
  target_link_libraries(weft_spdlog INTERFACE fmt::fmt-header-only)
  set(WEFT_SPDLOG weft_spdlog)
  find_library(WEFT_STATIC_CRYPTO libcrypto.a)
  if(NOT WEFT_STATIC_CRYPTO)
    message(FATAL_ERROR "WEFT_STATIC_DEPENDENCIES=ON, but there is no libcrypto.a: install libssl-dev, or switch it off")
  endif()
  find_library(WEFT_STATIC_TLS libssl.a)
  if(NOT WEFT_STATIC_TLS)
    message(FATAL_ERROR "WEFT_STATIC_DEPENDENCIES=ON, but there is no libssl.a: install libssl-dev, or switch it off")
  endif()
  set(WEFT_CRYPTO ${WEFT_STATIC_CRYPTO})
  set(WEFT_TLS ${WEFT_STATIC_TLS} ${WEFT_STATIC_CRYPTO})
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
# No source is a module; without this, CMake would run clang-scan-deps on every file.
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
