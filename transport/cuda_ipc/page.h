// SPDX-License-Identifier: Apache-2.0
// A page of counters in shared memory. Each end of a connection has its own page. The peer raises a
// word in it when it has read the payloads of the message with that slot; words only count up. It
// sets a last word, closed(), when it does not read this end's memory any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <weft/base/descriptor.h>
#include <weft/base/fence.h>
#include <weft/transport/cuda_ipc/wire.h>

namespace weft::transport::cuda_ipc {

class Page {
 public:
  // Throws Busy.
  static std::shared_ptr<Page> make();
  // Opens the page of another process of this user, or of this process. Throws PeerLost if it
  // cannot be opened or is a different page (the descriptor's number may be reused once a
  // connection has closed it), Unsupported if this process has no permission to open it.
  static std::shared_ptr<Page> open(std::uint64_t process, const PageName& name);
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  // The name by which other processes open it.
  PageName name() const { return {static_cast<std::uint32_t>(descriptor_.get()), key()}; }
  std::atomic<std::uint32_t>& word(std::size_t gpu, std::size_t slot) const;
  std::atomic<std::uint32_t>& closed() const;

 private:
  std::uint64_t& key() const;
  Page(Descriptor descriptor, void* memory)
      : descriptor_(std::move(descriptor)), memory_(static_cast<std::byte*>(memory)) {}
  const Descriptor descriptor_;
  std::byte* memory_;
};

// Tells whether a process still lives. (Its number is not enough, as numbers are reused.)
class Process {
 public:
  // Throws Busy, and Unsupported on a system without pidfd_open.
  explicit Process(std::uint64_t number);
  bool has_ended() const noexcept;
  std::uint64_t number() const { return number_; }

 private:
  const std::uint64_t number_;
  const Descriptor descriptor_;
};

// Passes when a word of our page has reached `value`: the peer has read the message's payloads.
// Also passes when the peer has closed the connection or its process has ended.
class ReadFence final : public Fence::Source {
 public:
  ReadFence(std::shared_ptr<Page> page, std::shared_ptr<Process> peer, std::size_t gpu,
            std::size_t slot, std::uint32_t value)
      : page_(std::move(page)),
        peer_(std::move(peer)),
        word_(page_->word(gpu, slot)),
        value_(value) {}

  bool was_read() const noexcept {
    return static_cast<std::int32_t>(word_.load(std::memory_order_acquire) - value_) >= 0;
  }
  bool query() const noexcept override;
  bool synchronize(Deadline deadline) const noexcept override;
  // Throws Unsupported unless the fence has passed: only the event loop waits for it.
  void wait(const cuda::StreamRef& stream) const override;
  bool on_passed(Task&) const override { return false; }

 private:
  std::shared_ptr<Page> page_;
  std::shared_ptr<Process> peer_;
  std::atomic<std::uint32_t>& word_;
  std::uint32_t value_;
  mutable std::atomic<std::uint32_t> asked_{0};
  mutable std::atomic<bool> is_gone_{false};
};

}  // namespace weft::transport::cuda_ipc
