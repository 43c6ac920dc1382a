// What the ranks of one fake NCCL communicator share: the operations in which they meet, and the
// messages between them. Only fake_nccl*.cc includes this.
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
  int root = 0;  // the peer of a message
};

// A call with its place in the order: of the collectives, or of the messages of a pair.
struct Placed {
  FakeCall call;
  std::size_t number = 0;
};

// Under its own lock; called by streams, so nothing here calls the driver.
class FakeWorld {
 public:
  explicit FakeWorld(int ranks) : ranks_(ranks) {}

  // The rank's stream has come to the operation: its input is copied. Returns what ranks disagree
  // about, if they do.
  std::string arrive(int rank, const Placed& placed);
  // Whether the output can be written.
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
  std::map<std::pair<int, int>, std::map<std::size_t, Message>>
      messages_;  // by sender and receiver
};

}  // namespace weft::harness
