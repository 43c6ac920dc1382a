// NCCL over the fake CUDA driver: the same table (transport/nccl/library.h), for ranks that are
// threads of one process. Kernels are operations on the fake driver's streams: one that says the
// rank has come, with a copy of its input, and one that waits for the others and writes the output.
// So an operation hangs its stream as long as a peer has not come, and a receive as long as its
// send has not.
//
// Every communicator is non-blocking: a call is in progress until it was asked for a few times, or
// as long as a test holds it. What the real library answers with garbage, a hang or a crash is a
// complaint: a call before the last one has settled, ranks that disagree about an operation, a
// handle that was freed. Complaints that no test took fail it when the FakeNccl ends, and so do
// communicators that nobody freed.
//
// One at a time, as the FakeDriver, which must outlive it. Every function may be called from every
// thread.
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

  // How often a call must be asked for before it has settled; 0: calls settle at once. At first 2.
  void settle_after(int polls);
  // Keeps the calls that this rank makes from now on in progress until it is released, as if
  // a peer had to be connected.
  void hold(int rank);
  void release(int rank);
  // The rank's communicators report the error from now on.
  void fail_async(int rank, ncclResult_t result);
  // The n-th call of that function from now on (1: the next) fails with `result` and does nothing.
  template <class F>
  void fail(F Library::*function, ncclResult_t result, int nth = 1) {
    fail_function(index_of(function), result, nth);
  }
  // How often the function was called.
  template <class F>
  int calls(F Library::*function) const {
    return calls_of(index_of(function));
  }

  // Communicators that are neither destroyed nor aborted; how many were ended by ncclCommAbort.
  int alive() const;
  int aborted() const;
  // Those that are alive may stay so: their device is lost.
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
