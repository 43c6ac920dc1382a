// SPDX-License-Identifier: Apache-2.0
// The state that the ranks of one fake NCCL communicator share: the operations in which they meet,
// and their messages. Only fake_nccl*.cc includes this.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <nccl.h>

#include <weft/tests/harness/elements.h>

namespace weft::harness {

enum class Kind { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Send, Recv };
const char* name(Kind kind);

struct FakeCall {
  Kind kind;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // or the peer of a message
};

// A call and its number: among the collectives, or among the messages of a pair.
struct Placed {
  FakeCall call;
  std::size_t number = 0;
};

// It has its own lock. Streams call it, so nothing here calls the driver.
class FakeWorld {
 public:
  explicit FakeWorld(int ranks) : ranks_(ranks) {}

  // Copies the rank's input when its stream reaches the operation. Returns how ranks disagree, or
  // "".
  std::string arrive(int rank, const Placed& placed);
  // True if the output can be written.
  bool complete(int rank, const Placed& placed);
  void finish(int rank, const Placed& placed);

 private:
  struct Meeting {
    FakeCall first;
    std::vector<std::vector<std::byte>> inputs;  // by rank
    int arrived = 0;
    int finished = 0;
  };
  using Message = std::vector<std::byte>;

  const int ranks_;
  std::mutex mutex_;
  std::map<std::size_t, Meeting> meetings_;
  // By sender and receiver.
  std::map<std::pair<int, int>, std::map<std::size_t, Message>> messages_;
};

}  // namespace weft::harness
