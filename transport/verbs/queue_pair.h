// SPDX-License-Identifier: Apache-2.0
// A reliable connected queue pair: it executes posted work in order, or fails. All its completions
// arrive in one queue. The post_ functions are thread-safe; the others are for one thread at a
// time.
#pragma once

#include <memory>

#include <weft/transport/verbs/completion.h>
#include <weft/transport/verbs/registration.h>
#include <weft/transport/verbs/wire.h>

namespace weft::transport::verbs {

class QueuePair {
 public:
  // How many work requests may be outstanding, and how many bytes one may carry inline.
  struct Depths {
    int sends = 0;
    int receives = 0;
    int inline_bytes = 0;
  };

  // Creates the pair in a state in which receives can be posted. Throws Busy, Device.
  QueuePair(Path path, const Completions& completions, const Depths& wanted);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  const Path& path() const { return path_; }
  const Depths& depths() const { return depths_; }
  // The next two must not be called after destroy().
  std::uint32_t number() const { return pair_->qp_num; }
  const ibv_qp* handle() const { return pair_; }
  // Number of the first packet that it sends.
  std::uint32_t first_packet() const { return first_packet_; }

  // Connects it to the peer's queue pair. Throws Unsupported if the two ports are on different
  // fabrics, PeerLost if the device finds no way to the peer.
  void join(const Hello& peer);
  // Stops sending and receiving; outstanding work completes with a flush. Idempotent. A packet that
  // is being processed may still end after this.
  void cut() noexcept;
  // Like cut(); in addition, once it returns, the device does not access any memory for this pair,
  // however long that memory stays registered. Completions that have not been polled may be lost,
  // and nothing can be posted any more. Must not run while another thread posts. Idempotent.
  // (Resetting the pair would be enough, but rxe in Linux 6.1 then loses count of references.)
  void destroy() noexcept;
  // True if the device refused to destroy the pair, which is logged. It may then access the memory
  // at any later time.
  bool is_stuck() const { return is_stuck_; }

  // Post work. `number` comes back in the completion. Return false if the device takes no more or
  // has failed.
  bool post_receive(std::uint64_t number, void* to, std::uint32_t bytes,
                    std::uint32_t key) noexcept;
  bool post_send(std::uint64_t number, const void* from, std::uint32_t bytes) noexcept;  // inline
  struct Write {
    const void* from = nullptr;
    std::uint32_t bytes = 0;
    std::uint32_t local_key = 0;
    std::uint64_t to = 0;
    std::uint32_t remote_key = 0;
    std::optional<std::uint32_t> immediate;  // sent to the peer with the write
    // This thread may copy a few bytes into the request. Must be false for GPU memory.
    bool may_inline = false;
  };
  bool post_write(std::uint64_t number, const Write& write) noexcept;

 private:
  bool post(ibv_send_wr& request) noexcept;
  void prepare();

  const Path path_;
  Depths depths_;
  std::uint32_t first_packet_;
  ibv_qp* pair_ = nullptr;  // null after destroy()
  bool is_stuck_ = false;
};

}  // namespace weft::transport::verbs
