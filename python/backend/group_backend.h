// SPDX-License-Identifier: Apache-2.0
// The backend without its operations: its group of Weft, time limits, how operations are issued,
// and leaving.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <weft/group.h>
#include <weft/python/backend/arguments.h>
#include <weft/python/backend/call_order.h>
#include <weft/python/backend/coalescing.h>
#include <weft/python/backend/device_groups.h>
#include <weft/python/backend/work.h>

namespace weft::python {

// The arguments with which c10d makes a group.
struct Place {
  int rank = 0;
  int size = 0;
  std::string name;
  std::chrono::milliseconds timeout{0};  // of joining, and of each operation
};

class GroupBackend : public c10d::Backend {
 public:
  // The group is empty if it is made later, by replace(). `store` is the one by which ranks meet.
  GroupBackend(weft::ProcessGroup group, c10::intrusive_ptr<c10d::Store> store, Place place);
  ~GroupBackend() override;

  const std::string getBackendName() const override { return "weft"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return number_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_.begin(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // The group that carries CPU tensors. Throws CallerError after shutdown().
  weft::ProcessGroup group() const;
  // False after shutdown().
  bool is_present() const { return !groups_.all().empty(); }
  // Leaves all groups of this process as the interpreter ends: politely, as shutdown() does, or at
  // once and without a word, as if the process had been killed.
  static void leave_all(bool politely);
  // Tells the ranks of all groups of this process that an exception ends this one's program. Waits
  // for nobody.
  static void leave_by_exception();

 protected:
  using Works = std::vector<weft::Work>;

  struct Call {
    CallName name;
    std::chrono::milliseconds timeout;  // if not positive, the group's counts
    c10::Device device;
    std::vector<at::Tensor> inputs;   // that the profiler shows
    std::vector<at::Tensor> outputs;  // the result
  };
  // Calls the function with the group for the device, limited to the time of the call. All works
  // that it returns belong to the operation. Outputs that were replaced are copied back at its end.
  c10::intrusive_ptr<c10d::Work> issue(
      Call call, const std::function<Works(weft::ProcessGroup&, Outputs&)>& function);
  // The limit of a call: its own, or the group's.
  std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) const;
  // The groups that exist (DeviceGroups::all), limited in time.
  std::vector<weft::ProcessGroup> limited_groups(std::chrono::milliseconds timeout) const;
  const Place& place() const { return place_; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  // See DeviceGroups::take().
  std::vector<weft::ProcessGroup> taken_groups() { return groups_.take(); }
  void replace(weft::ProcessGroup group, const Place& place);

 private:
  void leave(std::chrono::milliseconds limit);

  DeviceGroups groups_;  // none after shutdown()
  c10::intrusive_ptr<c10d::Store> store_;
  Place place_;
  std::atomic<bool> is_aborted_{false};  // by abort(), until replace()
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> number_{0};
  Coalescing coalescing_;
  CallOrder order_;
};

}  // namespace weft::python
