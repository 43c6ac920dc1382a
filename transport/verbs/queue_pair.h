// A reliable connected queue pair: what is posted is carried out in order, or it fails. Its
// completions go to one queue. post_* are for every thread; the rest for one at a time.
#pragma once

#include <memory>

#include <weft/transport/verbs/completion.h>
#include <weft/transport/verbs/registration.h>
#include <weft/transport/verbs/wire.h>

namespace weft::transport::verbs {

class QueuePair {
 public:
  // How much may be outstanding, and how much a work request may carry in itself.
  struct Depths {
    int sends = 0;
    int receives = 0;
    int inline_bytes = 0;
  };

  // Made so that receives can be posted. Throws Busy.
  QueuePair(Path path, const Completions& completions, const Depths& wanted);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  const Path& path() const { return path_; }
  const Depths& depths() const { return depths_; }
  // Not once it has been destroyed.
  std::uint32_t number() const { return pair_->qp_num; }
  const ibv_qp* handle() const { return pair_; }
  // Of the first packet that it sends.
  std::uint32_t first_packet() const { return first_packet_; }

  // Joins it to the peer's. Throws Unsupported where the two ports cannot be joined, Device.
  void join(const Hello& peer);
  // Nothing is sent and nothing is let in any more; what is outstanding completes with a flush.
  // Idempotent. A packet that is being carried out may still end after this.
  void cut() noexcept;
  // As cut(), and once it returns the device touches nobody's memory for this pair, however long
  // that stays registered. Completions that have not been polled may be lost, and nothing is posted
  // from then on. Not while anybody posts. Idempotent. (To reset the pair would do, but that of
  // rxe, in Linux 6.1, lost count of references.)
  void destroy() noexcept;
  // The device refused to destroy it, which is logged: it may be at work on that memory for ever.
  bool is_stuck() const { return is_stuck_; }

  // The numbers come back in the completions. False where the device takes no more, or has failed.
  bool post_receive(std::uint64_t number, void* to, std::uint32_t bytes,
                    std::uint32_t key) noexcept;
  bool post_send(std::uint64_t number, const void* from, std::uint32_t bytes) noexcept;  // inline
  struct Write {
    const void* from = nullptr;
    std::uint32_t bytes = 0;
    std::uint32_t local_key = 0;
    std::uint64_t to = 0;
    std::uint32_t remote_key = 0;
    std::optional<std::uint32_t> immediate;  // the peer is told
    bool may_inline = false;  // few bytes are read by this thread, which cannot read a GPU's
  };
  bool post_write(std::uint64_t number, const Write& write) noexcept;

 private:
  bool post(ibv_send_wr& request) noexcept;
  void prepare();

  const Path path_;
  Depths depths_;
  std::uint32_t first_packet_;
  ibv_qp* pair_ = nullptr;  // null once it has been destroyed
  bool is_stuck_ = false;
};

}  // namespace weft::transport::verbs
