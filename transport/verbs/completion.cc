// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <fcntl.h>

#include <weft/base/make_error.h>
#include <weft/transport/verbs/completion.h>

namespace weft::transport::verbs {

namespace {

// Explains the status to the operator of a cluster.
const char* meaning_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return "the peer acknowledges nothing: its process or machine is gone, or packets are lost "
             "on the way (cable, switch, PFC, firewall for UDP 4791)";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "receiver not ready (RNR retries exhausted) although it had advertised room";
    case IBV_WC_REM_ACCESS_ERR: return "the peer has withdrawn access to its memory";
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR: return "the peer could not execute the request";
    case IBV_WC_WR_FLUSH_ERR: return "the queue pair was torn down";
    case IBV_WC_LOC_PROT_ERR: return "memory was released while it was being sent";
    default: return "the device reported an error";
  }
}

}  // namespace

Completions::Completions(std::shared_ptr<Device> device, int entries) : device_(std::move(device)) {
  const Library& library = device_->library();
  channel_ = library.create_comp_channel(device_->context());
  if (channel_ == nullptr)
    throw system_error(Blame::Busy, device_->name() + ": no completion channel", errno);
  const int flags = ::fcntl(channel_->fd, F_GETFL);
  ::fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK);
  queue_ = library.create_cq(device_->context(), entries, nullptr, channel_, 0);
  if (queue_ == nullptr) {
    const int number = errno;
    library.destroy_comp_channel(channel_);
    throw system_error(
        Blame::Busy,
        device_->name() + ": no completion queue of " + std::to_string(entries) + " entries",
        number);
  }
}

Completions::~Completions() {
  device_->has_ended(device_->library().destroy_cq(queue_),
                     "a completion queue cannot be destroyed");
  device_->library().destroy_comp_channel(channel_);
}

std::span<const ibv_wc> Completions::poll(std::span<ibv_wc> entries) {
  const int count = ::ibv_poll_cq(queue_, static_cast<int>(entries.size()), entries.data());
  if (count < 0)
    throw Error(Blame::Device, device_->name() + ": its completion queue cannot be read", count);
  return entries.first(static_cast<std::size_t>(count));
}

bool Completions::arm() noexcept { return ::ibv_req_notify_cq(queue_, 0) == 0; }

void Completions::take_event() noexcept {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (device_->library().get_cq_event(channel_, &queue, &context) == 0)
    device_->library().ack_cq_events(queue, 1);
}

Error error_of(const Library& library, const ibv_wc& completion, const std::string& peer) {
  const std::string text =
      "verbs: the queue pair to " + peer + " failed: " + library.wc_status_str(completion.status) +
      " (status " + std::to_string(completion.status) + ", vendor error " +
      std::to_string(completion.vendor_err) + "): " + meaning_of(completion.status);
  switch (completion.status) {
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR: return {Blame::Device, text, static_cast<int>(completion.status)};
    default: return {Blame::PeerLost, text, static_cast<int>(completion.status)};
  }
}

}  // namespace weft::transport::verbs
