// SPDX-License-Identifier: Apache-2.0
// NCCL over the fake CUDA driver: the same table (transport/nccl/library.h), for ranks that are
// threads of one process. A kernel is two operations on a fake driver's stream: the first marks the
// rank as arrived and copies its input, the second waits for the others and writes the output. So
// an operation hangs its stream until all peers have arrived, and a receive until its send has.
//
// Every communicator is non-blocking: a call is in progress until it has been polled a few times,
// or as long as a test holds it. Misuse that the real library answers with garbage, a hang or a
// crash is a complaint: a call before the last one has settled, ranks that disagree about an
// operation, a handle that was freed. Complaints that no test has taken fail the test when the
// FakeNccl is destroyed; so do communicators that were not freed.
//
// One at a time, like the FakeDriver, which must outlive it. Any thread may call every function.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/tests/harness/fake_driver.h>
#include <weft/transport/nccl/library.h>

namespace weft::harness {

class FakeNcclState;

class FakeNccl {
 public:
  using Library = transport::nccl::Library;

  explicit FakeNccl(FakeDriver& driver);
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  std::shared_ptr<const Library> library() const;

  // Sets how often a call must be polled before it settles; 0: calls settle at once. The default is
  // 2.
  void settle_after(int polls);
  // Keeps the calls that this rank makes from now on in progress until it is released, as if a peer
  // were still connecting.
  void hold(int rank);
  void release(int rank);
  // Makes the rank's communicators report the error from now on.
  void fail_async(int rank, ncclResult_t result);
  // Makes the n-th call of the function from now on (1: the next) fail with `result` and do
  // nothing.
  template <class F>
  void fail(F Library::*function, ncclResult_t result, int nth = 1) {
    fail_function(index_of(function), result, nth);
  }
  // Returns how often the function was called.
  template <class F>
  int calls(F Library::*function) const {
    return calls_of(index_of(function));
  }

  // alive() counts the communicators that are neither destroyed nor aborted; aborted() counts those
  // that ncclCommAbort ended.
  int alive() const;
  int aborted() const;
  // Allows living communicators to stay, because their device is lost.
  void forget_alive();
  std::vector<std::string> take_complaints();

 private:
  template <class F>
  static std::size_t index_of(F Library::*function) {
    const Library table;
    const auto* slot = reinterpret_cast<const std::byte*>(&(table.*function));
    return static_cast<std::size_t>(slot - reinterpret_cast<const std::byte*>(&table)) /
           sizeof(void*);
  }
  void fail_function(std::size_t index, ncclResult_t result, int nth);
  int calls_of(std::size_t index) const;

  std::unique_ptr<FakeNcclState> state_;
  std::shared_ptr<const Library> table_;
};

}  // namespace weft::harness
