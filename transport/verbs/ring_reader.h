// SPDX-License-Identifier: Apache-2.0
// The receiving half of a connection: the ring that the peer writes to, and the place that read()
// has named for a large piece. It checks everything that the peer says, so a peer can spoil only
// its own bytes. Used by the event loop's thread only.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include <weft/transport/verbs/ring_writer.h>

namespace weft::transport::verbs {

class RingReader {
 public:
  // `writer` is the sending half, which sends this half's notes. Throws Busy.
  RingReader(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations, RingWriter& writer);

  // For the hello.
  std::uint64_t ring_address() const {
    return reinterpret_cast<std::uintptr_t>(ring_.whole().data);
  }
  std::uint32_t ring_key() const { return ring_registration_.remote_key(); }
  std::uint32_t receives() const { return receives_; }

  // Handle a completed receive, and post it again: wrote() for a write's immediate, noted() for a
  // note of `bytes` in buffer `number`. Return null, or a text that says why the peer's message is
  // invalid.
  [[nodiscard]] const char* wrote(std::uint64_t number, std::uint32_t immediate);
  [[nodiscard]] const char* noted(std::uint64_t number, std::uint32_t bytes);
  bool has_finished() const { return finished_; }

  // See ByteStream.
  Bytes peek() noexcept;
  void consume(std::size_t bytes) noexcept;
  std::size_t read(std::span<std::byte> to) noexcept;
  // True while the peer may write to the place that read() has named; withdraw() ends that.
  bool is_placing() const { return direct_.phase == Phase::Placing; }
  // Ensures that the place that read() has named is not written to any more. If a place is open,
  // destroys the queue pair and returns true.
  bool withdraw() noexcept;

 private:
  enum class Phase { None, Waits, Placing, Placed };
  // The piece that waits for a place or is being written to it.
  struct Direct {
    Phase phase = Phase::None;
    std::uint64_t position = 0;  // in the ring: where it belongs in the stream
    std::uint64_t bytes = 0;     // of the piece; once it has a place, of the place
    std::byte* place = nullptr;
    std::shared_ptr<const Registration> registration;
  };

  void post_receive(std::uint64_t number);
  void received(std::uint64_t number);
  const char* take(const Note& note);
  // Bytes in the ring before the piece.
  std::size_t readable() const;
  bool is_at_piece() const { return direct_.phase != Phase::None && tail_ == direct_.position; }
  void name_place(std::span<std::byte> to) noexcept;
  // Copies from the ring to host or GPU memory. Returns false if the GPU has failed.
  bool copy_out(std::span<std::byte> to) noexcept;
  void send_through_ring() noexcept;
  // Advances from the present piece to the next one, if any.
  void go_on() noexcept;
  void tell_room() noexcept;

  QueuePair& pair_;
  const std::shared_ptr<RegistrationCache> registrations_;
  RingWriter& writer_;
  Mirror ring_;
  const Registration ring_registration_;
  const std::uint32_t receives_;
  // A buffer for each receive. Not on the heap: while a page of private memory is registered,
  // fork() copies it at another moment than the pages around it, so the child's heap may be
  // inconsistent.
  Mirror notes_;
  const Registration notes_registration_;

  std::uint64_t head_ = 0;  // bytes received in total
  std::uint64_t tail_ = 0;  // bytes read in total
  std::uint64_t told_ = 0;  // the tail that the peer was told
  std::uint32_t granted_ = 0;
  std::uint32_t told_granted_ = 0;
  Direct direct_;
  // The piece after that. It waits until read() has taken the present one.
  std::optional<Note> next_;
  bool finished_ = false;
  bool has_copied_ = false;  // to a GPU, which is slow; logged once
  // Copying bytes to their destination has failed; peek() and read() return nothing more.
  bool broken_ = false;
};

}  // namespace weft::transport::verbs
