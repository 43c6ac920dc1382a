// SPDX-License-Identifier: Apache-2.0
// Drives the target without libFuzzer: with valid dialogues, changed at random, the same ones in
// every run.
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <weft/tests/fuzz/mesh_fuzz.h>

namespace weft::transport::mesh {
namespace {

using Input = std::vector<std::byte>;

void add_record(Input& input, unsigned what, std::size_t bytes, const Header& header = {}) {
  input.push_back(static_cast<std::byte>(what));
  input.push_back(static_cast<std::byte>(bytes & 0xff));
  input.push_back(static_cast<std::byte>(bytes >> 8));
  input.push_back(std::byte{0});
  const auto encoded = encode(header);
  input.insert(input.end(), encoded.begin(), encoded.end());
}

void add_message(Input& input, Traffic traffic, bool in_place, std::size_t payload,
                 const Header& header) {
  add_record(input, static_cast<unsigned>(traffic) | (in_place ? 2u : 0u), payload, header);
}

// After it, this rank looks for a connection that it could close.
void add_closing(Input& input, Traffic traffic, ClosingStep step) {
  Header header;
  header.type = Type::Closing;
  header.number = static_cast<std::uint32_t>(step);
  add_record(input, static_cast<unsigned>(traffic) | 4u, 0, header);
}

// The first byte of a record that stands for the target's call of that number.
unsigned call_number(unsigned which) { return 135 + which; }

Header message(Type type, std::uint64_t bytes, int tag, std::uint64_t number) {
  Header header;
  header.type = type;
  header.call.bytes = bytes;
  header.call.dtype = Dtype::Float32;
  header.call.root = tag;
  header.sequence = number;
  return header;
}

// Calls of every kind and the peer's parts in them, and steps of closing. It ends with no operation
// pending.
Input dialogue(bool in_place, bool peer_first) {
  Input input;
  constexpr std::size_t kBytes = 64;
  constexpr std::size_t kLarge = 60'000;
  std::uint64_t sequence = 0;
  const auto collective = [&](unsigned which, const Call& call, std::size_t payload,
                              std::uint32_t parts = 1) {
    if (!peer_first)
      add_record(input, call_number(which), call.kind == Kind::AllToAll ? kBytes : call.bytes);
    for (std::uint32_t part = 0; part < parts; ++part) {
      Header header;
      header.call = call;
      header.sequence = sequence;
      header.number = part;
      add_message(input, Traffic::Collectives, in_place, payload, header);
      if (peer_first && part == 0) {
        add_record(input, call_number(which), call.kind == Kind::AllToAll ? kBytes : call.bytes);
      }
    }
    ++sequence;
  };
  collective(0, {Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, kBytes}, kBytes);
  collective(1, {Kind::Broadcast, Dtype::Float32, ReduceOp::Sum, 1, kLarge}, kLarge);
  collective(2, {Kind::Reduce, Dtype::Float32, ReduceOp::Max, 0, kBytes}, kBytes);
  collective(3, {Kind::AllGather, Dtype::UInt8, ReduceOp::Sum, 0, kBytes}, kBytes);
  collective(4, {Kind::AllToAll, Dtype::UInt8, ReduceOp::Sum, 0, 0}, kBytes);
  collective(5, {Kind::Barrier, Dtype::UInt8, ReduceOp::Sum, 0, 0}, 0);
  add_closing(input, Traffic::Messages, ClosingStep::Ask);
  add_record(input, call_number(7), kBytes);  // recv
  add_message(input, Traffic::Messages, in_place, kBytes, message(Type::Eager, kBytes, 0, 0));
  add_message(input, Traffic::Messages, in_place, kBytes, message(Type::Eager, kBytes, 1, 0));
  add_record(input, call_number(8), kBytes);  // from any source
  add_message(input, Traffic::Messages, in_place, 0, message(Type::Request, kLarge, 0, 9));
  add_record(input, call_number(7), kLarge);
  add_message(input, Traffic::Messages, in_place, kLarge, message(Type::Payload, kLarge, 0, 9));
  add_record(input, call_number(6), kLarge);                // send
  add_closing(input, Traffic::Messages, ClosingStep::Ask);  // is refused: the send waits
  add_message(input, Traffic::Messages, in_place, 0, message(Type::Clear, 0, 0, 3));
  // This rank has asked for the connection that it has not used for longer, then asks for the
  // other.
  add_closing(input, Traffic::Collectives, ClosingStep::Refuse);
  add_closing(input, Traffic::Messages, ClosingStep::Refuse);
  add_closing(input, Traffic::Collectives, ClosingStep::Idle);
  add_closing(input, Traffic::Collectives, ClosingStep::Agree);
  add_record(input, call_number(7), kBytes);
  add_message(input, Traffic::Messages, in_place, kBytes, message(Type::Eager, kBytes, 0, 0));
  return input;
}

TEST(MeshFuzz, ValidDialogueEndsEveryOperation) {
  for (const bool in_place : {true, false}) {
    for (const bool peer_first : {true, false}) {
      const Outcome outcome = fuzz_mesh(dialogue(in_place, peer_first));
      EXPECT_EQ(outcome.done, 11u);
      EXPECT_EQ(outcome.failed, 0u);
      EXPECT_EQ(outcome.pending, 0u);
    }
  }
}

TEST(MeshFuzz, ChangesBreakOnlyTheCommunicator) {
  std::mt19937 random(20240311);
  const auto upto = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit)(random);
  };
  constexpr int kRounds = 8000;
  std::size_t failed = 0, done = 0;
  for (int round = 0; round < kRounds; ++round) {
    Input input = dialogue(upto(1) == 0, upto(1) == 0);
    for (std::size_t changes = 1 + upto(3); changes > 0; --changes) {
      const std::size_t records = input.size() / kRecordBytes;
      if (records == 0) break;
      const auto record = [&] {
        return input.begin() + static_cast<std::ptrdiff_t>(upto(records - 1) * kRecordBytes);
      };
      switch (upto(5)) {
        case 0: input[upto(input.size() - 1)] = static_cast<std::byte>(upto(255)); break;
        case 1: input[upto(input.size() - 1)] ^= static_cast<std::byte>(1u << upto(7)); break;
        case 2: {  // repeats a record
          const auto from = record();
          const Input copy(from, from + kRecordBytes);
          input.insert(record(), copy.begin(), copy.end());
          break;
        }
        case 3: {  // removes a record
          const auto from = record();
          input.erase(from, from + kRecordBytes);
          break;
        }
        case 4: {
          const auto first = record(), second = record();
          if (first != second) std::swap_ranges(first, first + kRecordBytes, second);
          break;
        }
        default: input.resize(upto(input.size() - 1) + 1); break;
      }
    }
    const Outcome outcome = fuzz_mesh(input);
    failed += outcome.failed;
    done += outcome.done;
  }
  EXPECT_GT(failed, 1000u);  // the changes reach the communicator, and not all break it at once
  EXPECT_GT(done, 1000u);
}

}  // namespace
}  // namespace weft::transport::mesh
