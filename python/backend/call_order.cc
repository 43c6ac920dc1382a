// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <weft/python/backend/call_order.h>

namespace weft::python {

namespace {

// Messages are matched by their ranks and tags.
bool is_message(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
         type == c10d::OpType::RECVANYSOURCE;
}

}  // namespace

void CallOrder::next(const CallName& name, const Cause& operation) {
  if (is_message(name.type)) return;
  const auto cause = cause_of_callback();
  if (!cause || cause->group != operation.group) {
    last_of_program_ = operation.number;
    return;
  }
  const std::uint64_t last = last_of_program_;
  if (last <= cause->number) return;
  throw Error(Blame::Caller,
              std::string(name.operation) + ": the callback of a future (operation " +
                  std::to_string(cause->number) +
                  " of the group) issues it after the program has issued operation " +
                  std::to_string(last) +
                  " of the same group, and other ranks may issue these in another order; wait for "
                  "the first operation before the next, or let callbacks use a group of their own "
                  "(new_group)");
}

}  // namespace weft::python
