// SPDX-License-Identifier: Apache-2.0
// Every function of NCCL that Weft uses, in one table that dlopen fills, as cuda/driver.h does for
// the driver. So a program built with NCCL starts on a machine without it, and tests fill the same
// table with a fake. nccl.h is used for types only.
//
// The library may be older or newer than nccl.h. CMake accepts nccl.h of NCCL 2.28 or newer; open()
// accepts a library of kOldest or newer. A function that nccl.h 2.28 lacks must be declared in this
// file before it can be in the table.
//
// A Library is immutable and usable from every thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <nccl.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/result.h>

namespace weft::transport::nccl {

// NCCL 2.26 added NCCL_LAUNCH_ORDER_IMPLICIT. Without it two communicators on one device may wait
// for each other.
constexpr int kOldest = NCCL_VERSION(2, 26, 0);

// function(member, symbol, release that added it). open() requires the functions that kOldest has.
// A newer one is optional: its member is null in a library without it, and callers must check
// lacks() first.
// clang-format off
#define WEFT_NCCL_FUNCTIONS(function)                                             \
  function(get_version, ncclGetVersion, NCCL_VERSION(2, 3, 0))                    \
  function(get_error_string, ncclGetErrorString, NCCL_VERSION(2, 0, 0))           \
  function(get_last_error, ncclGetLastError, NCCL_VERSION(2, 13, 0))              \
  function(get_unique_id, ncclGetUniqueId, NCCL_VERSION(2, 0, 0))                 \
  function(comm_init_rank_config, ncclCommInitRankConfig, NCCL_VERSION(2, 14, 0)) \
  function(comm_get_async_error, ncclCommGetAsyncError, NCCL_VERSION(2, 4, 0))    \
  function(comm_finalize, ncclCommFinalize, NCCL_VERSION(2, 14, 0))               \
  function(comm_destroy, ncclCommDestroy, NCCL_VERSION(2, 0, 0))                  \
  function(comm_abort, ncclCommAbort, NCCL_VERSION(2, 4, 0))                      \
  function(all_reduce, ncclAllReduce, NCCL_VERSION(2, 0, 0))                      \
  function(reduce, ncclReduce, NCCL_VERSION(2, 0, 0))                             \
  function(broadcast, ncclBroadcast, NCCL_VERSION(2, 3, 0))                       \
  function(all_gather, ncclAllGather, NCCL_VERSION(2, 0, 0))                      \
  function(reduce_scatter, ncclReduceScatter, NCCL_VERSION(2, 0, 0))              \
  function(send, ncclSend, NCCL_VERSION(2, 7, 0))                                 \
  function(recv, ncclRecv, NCCL_VERSION(2, 7, 0))                                 \
  function(group_start, ncclGroupStart, NCCL_VERSION(2, 0, 0))                    \
  function(group_end, ncclGroupEnd, NCCL_VERSION(2, 0, 0))
// clang-format on

struct Library {
#define WEFT_NCCL_MEMBER(member, symbol, since) decltype(&::symbol) member = nullptr;
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_MEMBER)
#undef WEFT_NCCL_MEMBER

  // The places to look: first the process (libtorch_cuda loads one) and the loader's path, which in
  // the build tree has the folder beside nccl.h, then the wheel of NCCL beside the torch wheel
  // whose libtorch this process uses.
  static std::vector<std::string> candidates();
  // Opens the first file that exists and is new enough. Returns Unsupported, with the reason for
  // each, if none is.
  static Result<std::shared_ptr<const Library>> open(
      const std::vector<std::string>& files = candidates());

  // "2.28.9"
  std::string version() const;
  // Why this version cannot be used; empty if it can.
  std::optional<Error> too_old() const;
  // Returns Unsupported, with the function's name and the release that added it, if the library
  // lacks the function; else empty.
  template <class F>
  std::optional<Error> lacks(F Library::*function) const;

 private:
  Error lacking(const char* symbol, int since) const;
};

template <class F>
std::optional<Error> Library::lacks(F Library::*function) const {
  if (this->*function != nullptr) return std::nullopt;
#define WEFT_NCCL_LACKS(member, symbol, since)                        \
  if constexpr (std::is_same_v<F, decltype(Library::member)>) {       \
    if (function == &Library::member) return lacking(#symbol, since); \
  }
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_LACKS)
#undef WEFT_NCCL_LACKS
  broken("a function of NCCL that is not in the table");
}

// Makes an error such as "what: unhandled cuda error (ncclResult_t 1): NCCL's last error text",
// with the code as native_code(). Blame is Caller for invalid arguments and usage, PeerLost for
// system and remote errors, Device for all others.
Error error_of(const Library& library, ncclResult_t result, std::string_view what,
               Place place = Place::current());

}  // namespace weft::transport::nccl
