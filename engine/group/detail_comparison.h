// SPDX-License-Identifier: Apache-2.0
// WEFT_DEBUG=detail over backends whose messages do not describe the call: ranks exchange
// descriptions of their calls in the store and compare them.
//
// The group's Operations owns it. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <weft/base/op.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/numbers.h>
#include <weft/engine/group/operation.h>
#include <weft/engine/store/store.h>

namespace weft::group {

struct Core;

class DetailComparison {
 public:
  // All are the group's. `owner` keeps this object and them alive: callbacks, which may outlive it,
  // hold the owner weakly.
  DetailComparison(const CoreOptions& options, StoreBootstrap& store, Failure& failure,
                   MessageNumbers& numbers, const std::enable_shared_from_this<Core>& owner);

  // Throws Caller if another rank calls something else as its collective of that number. Blocks
  // until all ranks have come to it, at most for the group's timeout.
  void compare(const Operation& operation, std::uint64_t number);

  struct Message {
    std::string name;
    at::Tensor tensor;
    bool is_send = false;
    int peer = -1;  // kAnySource for a recv from any
    int tag = 0;
    // Counts the messages between the two ranks with that tag. For a recv from any, known only once
    // it has ended.
    std::shared_ptr<std::uint64_t> number;
  };
  // Returns an operation that ends as the message does, or with Caller if the other side called it
  // with another tensor.
  Op compare(const Op& op, const Message& message);

 private:
  void compare_ended(const Op& op, const Message& message, const std::string& mine,
                     Completion& compared);

  const CoreOptions& options_;
  StoreBootstrap& store_;
  Failure& failure_;
  MessageNumbers& numbers_;
  const std::enable_shared_from_this<Core>& owner_;
};

}  // namespace weft::group
