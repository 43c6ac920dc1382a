// Every function of NCCL that Weft uses, in one table filled by dlopen, as cuda/driver.h does for the driver: a program
// built with NCCL starts on a machine without it, and the tests fill the same table with a fake. nccl.h gives types only.
//
// A Library is immutable and usable from every thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nccl.h>

#include <weft/base/error.h>
#include <weft/base/result.h>

namespace weft::transport::nccl {

// function(member, symbol)
// clang-format off
#define WEFT_NCCL_FUNCTIONS(function)                     \
  function(get_version, ncclGetVersion)                   \
  function(get_error_string, ncclGetErrorString)          \
  function(get_last_error, ncclGetLastError)              \
  function(get_unique_id, ncclGetUniqueId)                \
  function(comm_init_rank_config, ncclCommInitRankConfig) \
  function(comm_get_async_error, ncclCommGetAsyncError)   \
  function(comm_finalize, ncclCommFinalize)               \
  function(comm_destroy, ncclCommDestroy)                 \
  function(comm_abort, ncclCommAbort)                     \
  function(all_reduce, ncclAllReduce)                     \
  function(reduce, ncclReduce)                            \
  function(broadcast, ncclBroadcast)                      \
  function(all_gather, ncclAllGather)                     \
  function(reduce_scatter, ncclReduceScatter)             \
  function(send, ncclSend)                                \
  function(recv, ncclRecv)                                \
  function(group_start, ncclGroupStart)                   \
  function(group_end, ncclGroupEnd)
// clang-format on

struct Library {
#define WEFT_NCCL_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  WEFT_NCCL_FUNCTIONS(WEFT_NCCL_MEMBER)
#undef WEFT_NCCL_MEMBER

  // Where to look: the process (libtorch_cuda brings one) and the loader's path first, then the folder beside the nccl.h of
  // the build, so that a program of the build tree finds the wheel's copy.
  static std::vector<std::string> candidates();
  // The first of them that is there and new enough. Unsupported otherwise, with the reason for each.
  static Result<std::shared_ptr<const Library>> open(const std::vector<std::string>& files = candidates());

  // "2.28.9"
  std::string version() const;
  // Why this version cannot be used; nothing if it can.
  std::optional<Error> too_old() const;
};

// "what: unhandled cuda error (ncclUnhandledCudaError 1): the last error in NCCL's own words", with the code as
// native_code(). What NCCL refuses is Caller, a rank that cannot be reached PeerLost, the rest Device.
Error error_of(const Library& library, ncclResult_t result, std::string_view what, Place place = Place::current());

}  // namespace weft::transport::nccl
