// SPDX-License-Identifier: Apache-2.0
// Both halves of a connection on a queue pair of fake devices; the test drives them.
#pragma once

#include <array>
#include <memory>
#include <string>

#include <endian.h>

#include <weft/tests/harness/fake_verbs.h>
#include <weft/transport/verbs/ring_reader.h>

namespace weft::transport::verbs {

struct End {
  explicit End(const harness::FakeVerbs& fake, QueuePair::Depths depths = {64, 64, 64},
               GpuDirect allowed = GpuDirect::Auto)
      : path(fake.path()),
        registrations(std::make_shared<RegistrationCache>(path.device, allowed)),
        completions(path.device, 1024),
        pair(path, completions, depths),
        writer(pair, registrations, "the other end"),
        reader(pair, registrations, writer) {}
  ~End() { pair.destroy(); }

  Hello hello() const {
    Hello hello;
    hello.queue_pair = pair.number();
    hello.mtu_bytes = 4096;
    hello.receives = reader.receives();
    hello.ring_bytes = kRingBytes;
    hello.ring_key = reader.ring_key();
    hello.ring_address = reader.ring_address();
    hello.max_write_bytes = 1 << 20;
    return hello;
  }

  // Processes completions; returns whether there were any. An impossible statement of the peer is
  // stored in `refused`.
  bool turn() {
    std::array<ibv_wc, 16> room;
    const auto come = completions.poll(room);
    for (const ibv_wc& one : come) {
      const char* why = nullptr;
      if (one.status != IBV_WC_SUCCESS) {
        failed = one.status;
      } else if (one.opcode == IBV_WC_RECV) {
        why = reader.noted(one.wr_id, one.byte_len);
      } else if (one.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        why = reader.wrote(one.wr_id, be32toh(one.imm_data));
      } else {
        writer.sent();
      }
      if (why != nullptr) refused = why;
    }
    return !come.empty();
  }

  const Path path;
  const std::shared_ptr<RegistrationCache> registrations;
  Completions completions;
  QueuePair pair;
  RingWriter writer;
  RingReader reader;
  ibv_wc_status failed = IBV_WC_SUCCESS;
  std::string refused;
};

// Two joined ends.
struct Ends {
  Ends() {
    a.pair.join(b.hello());
    b.pair.join(a.hello());
    a.writer.open(b.hello());
    b.writer.open(a.hello());
  }
  // Runs until no completion is left.
  void settle() {
    for (bool found = true; found;) {
      found = a.turn();
      found |= b.turn();
    }
  }

  harness::FakeVerbs fake;
  End a{fake};
  End b{fake};
};

}  // namespace weft::transport::verbs
