// Every function of NCCL that Weft uses, in one table filled by dlopen, as cuda/driver.h does for
// the driver: a program built with NCCL starts on a machine without it, and the tests fill the same
// table with a fake. nccl.h gives types only.
//
// The library may be older or newer than nccl.h. CMake takes nccl.h from NCCL 2.28 on, open() a
// library from kOldest on. A function that is newer than nccl.h 2.28 must be declared in this file
// before it can be in the table.
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
#include <weft/base/result.h>

namespace weft::transport::nccl {

// NCCL_LAUNCH_ORDER_IMPLICIT, without which two communicators on one device may wait for each
// other, came with 2.26.
constexpr int kOldest = NCCL_VERSION(2, 26, 0);

// function(member, symbol, the release that brought it). open() requires those that kOldest has. A
// newer one is optional: its member is null in a library without it, and whoever calls it asks
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

  // Where to look: the process (libtorch_cuda brings one) and the loader's path first, then the
  // folder beside the nccl.h of the build, so that a program of the build tree finds the wheel's
  // copy.
  static std::vector<std::string> candidates();
  // The first of them that is there and new enough. Unsupported otherwise, with the reason for
  // each.
  static Result<std::shared_ptr<const Library>> open(
      const std::vector<std::string>& files = candidates());

  // "2.28.9"
  std::string version() const;
  // Why this version cannot be used; nothing if it can.
  std::optional<Error> too_old() const;
  // Unsupported, with the function's name and the release that brought it, where the library has no
  // such function.
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

// "what: unhandled cuda error (ncclUnhandledCudaError 1): the last error in NCCL's own words", with
// the code as native_code(). What NCCL refuses is Caller, a rank that cannot be reached PeerLost,
// the rest Device.
Error error_of(const Library& library, ncclResult_t result, std::string_view what,
               Place place = Place::current());

}  // namespace weft::transport::nccl
