// The receiving half of a lane: the ring that the peer writes to, and the place for a large piece
// that read() has named. What the peer says is checked: it can spoil its own bytes, nothing else.
// For the loop.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include <weft/transport/verbs/ring_writer.h>

namespace weft::transport::verbs {

class RingReader {
 public:
  // `writer` is the other half, which sends the notes. Throws Busy.
  RingReader(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations, RingWriter& writer);

  // For the hello.
  std::uint64_t ring_address() const {
    return reinterpret_cast<std::uintptr_t>(ring_.whole().data);
  }
  std::uint32_t ring_key() const { return ring_registration_.remote_key(); }
  std::uint32_t receives() const { return receives_; }

  // What a receive has brought: a write's immediate, or a note of `bytes` in the buffer with that
  // number. The receive is posted again. Returns why it cannot be, in words.
  [[nodiscard]] const char* wrote(std::uint64_t number, std::uint32_t immediate);
  [[nodiscard]] const char* noted(std::uint64_t number, std::uint32_t bytes);
  bool has_finished() const { return finished_; }

  // As ByteStream's.
  Bytes peek() noexcept;
  void consume(std::size_t bytes) noexcept;
  std::size_t read(std::span<std::byte> to) noexcept;
  // Whether the place that read() has named is being written to, which withdraw() ends.
  bool is_placing() const { return direct_.phase == Phase::Placing; }
  // The place that read() has named is written to no more; destroys the queue pair, and returns
  // true, where one is open.
  bool withdraw() noexcept;

 private:
  enum class Phase { None, Waits, Placing, Placed };
  // The piece that waits for a place, or goes to it.
  struct Direct {
    Phase phase = Phase::None;
    std::uint64_t position = 0;  // of the ring, where it belongs in the stream
    std::uint64_t bytes = 0;     // of the piece; of the place once there is one
    std::byte* place = nullptr;
    std::shared_ptr<const Registration> registration;
  };

  void post_receive(std::uint64_t number);
  void received(std::uint64_t number);
  const char* take(const Note& note);
  // Bytes that lie in the ring before the piece.
  std::size_t readable() const;
  bool is_at_piece() const { return direct_.phase != Phase::None && tail_ == direct_.position; }
  void name_place(std::span<std::byte> to) noexcept;
  // From the ring, to the host's memory or a GPU's. False where the GPU has failed.
  bool copy_out(std::span<std::byte> to) noexcept;
  void send_through_ring() noexcept;
  // To the piece behind the one that was the first.
  void go_on() noexcept;
  void tell_room() noexcept;

  QueuePair& pair_;
  const std::shared_ptr<RegistrationCache> registrations_;
  RingWriter& writer_;
  Mirror ring_;
  const Registration ring_registration_;
  const std::uint32_t receives_;
  std::vector<std::byte> notes_;  // a buffer for each receive
  const Registration notes_registration_;

  std::uint64_t head_ = 0;  // bytes that ever came
  std::uint64_t tail_ = 0;  // and were read
  std::uint64_t told_ = 0;  // the tail that the peer knows
  std::uint32_t granted_ = 0;
  std::uint32_t told_granted_ = 0;
  Direct direct_;
  std::optional<Note>
      next_;  // the piece behind that; it waits while read() has not taken one that is in its place
  bool finished_ = false;
  bool has_copied_ = false;  // to a GPU, which is slow and said once
  bool broken_ =
      false;  // the bytes that come next could not be moved to where they belong: no more is shown
};

}  // namespace weft::transport::verbs
