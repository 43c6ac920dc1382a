// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include <endian.h>

#include <weft/base/make_error.h>
#include <weft/transport/verbs/queue_pair.h>

namespace weft::transport::verbs {

namespace {

constexpr std::uint8_t kRetries = 7;
// 7 would mean without limit. Grants ensure that a receive is always posted.
constexpr std::uint8_t kNotReadyRetries = 6;
constexpr std::uint8_t kNotReadyTimer = 12;  // 0.64 ms
constexpr std::uint8_t kHopLimit = 64;

ibv_mtu mtu_of(std::uint32_t bytes) {
  int mtu = IBV_MTU_256;
  while (mtu < IBV_MTU_4096 && (128u << (mtu + 1)) <= bytes) ++mtu;
  return static_cast<ibv_mtu>(mtu);
}

}  // namespace

QueuePair::QueuePair(Path path, const Completions& completions, const Depths& wanted)
    : path_(std::move(path)), first_packet_(std::random_device()() & 0xffffff) {
  const Device& device = *path_.device;
  ibv_qp_init_attr attributes{};
  attributes.send_cq = completions.queue();
  attributes.recv_cq = completions.queue();
  attributes.qp_type = IBV_QPT_RC;
  attributes.sq_sig_all = 1;
  attributes.cap.max_send_wr =
      static_cast<std::uint32_t>(std::min(wanted.sends, device.limits().max_qp_wr));
  attributes.cap.max_recv_wr =
      static_cast<std::uint32_t>(std::min(wanted.receives, device.limits().max_qp_wr));
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_recv_sge = 1;
  attributes.cap.max_inline_data = static_cast<std::uint32_t>(wanted.inline_bytes);
  depths_ = {static_cast<int>(attributes.cap.max_send_wr),
             static_cast<int>(attributes.cap.max_recv_wr), wanted.inline_bytes};
  pair_ = device.library().create_qp(device.domain(), &attributes);
  if (pair_ == nullptr) {
    throw system_error(Blame::Busy,
                       device.name() + ": no queue pair of " + std::to_string(depths_.sends) +
                           " sends and " + std::to_string(depths_.receives) + " receives",
                       errno);
  }
  try {
    prepare();
  } catch (...) {
    destroy();
    throw;
  }
}

QueuePair::~QueuePair() { destroy(); }

void QueuePair::prepare() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<std::uint8_t>(path_.choice.port.port);
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  const int failed = path_.device->library().modify_qp(
      pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (failed != 0)
    throw system_error(Blame::Device, path_.name() + ": a queue pair cannot be prepared", failed);
}

void QueuePair::join(const Hello& peer) {
  const PortReport& port = path_.choice.port;
  if (peer.fabric != port.fabric) {
    throw Error(Blame::Unsupported,
                "verbs: the peer's port is on " + std::string(verbs::name(peer.fabric)) + ", but " +
                    port.name() + " is on " + std::string(verbs::name(*port.fabric)) +
                    "; choose another port with WEFT_IB_HCA");
  }
  const Library& library = path_.device->library();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu =
      mtu_of(std::min(peer.mtu_bytes, static_cast<std::uint32_t>(port.mtu_bytes)));
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = peer.packet;
  attributes.min_rnr_timer = kNotReadyTimer;
  ibv_ah_attr& address = attributes.ah_attr;
  address.sl = path_.service_level;
  address.port_num = static_cast<std::uint8_t>(port.port);
  address.dlid = peer.lid;
  // RoCE always uses global addresses; InfiniBand needs them only across a router, where the
  // prefixes differ.
  const GidBytes& here = path_.choice.gid.bytes;
  address.is_global =
      peer.fabric == Fabric::Roce || !std::equal(here.begin(), here.begin() + 8, peer.gid.begin());
  std::memcpy(address.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  address.grh.sgid_index = static_cast<std::uint8_t>(path_.choice.gid.index);
  address.grh.hop_limit = kHopLimit;
  address.grh.traffic_class = path_.traffic_class;
  int failed =
      library.modify_qp(pair_, &attributes,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (failed == 0) {
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = path_.timeout;
    attributes.retry_cnt = kRetries;
    attributes.rnr_retry = kNotReadyRetries;
    attributes.sq_psn = first_packet_;
    failed = library.modify_qp(pair_, &attributes,
                               IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  if (failed != 0) {
    const Gid theirs{0, peer.gid, GidType::RoceV2, {}};
    throw system_error(Blame::PeerLost,
                       "verbs: cannot connect from " + port.name() + " (GID " +
                           path_.choice.gid.text() + ") to GID " + theirs.text() +
                           "; are both ports on the same network?",
                       failed);
  }
}

void QueuePair::cut() noexcept {
  if (pair_ == nullptr) return;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  path_.device->library().modify_qp(pair_, &attributes, IBV_QP_STATE);
}

void QueuePair::destroy() noexcept {
  ibv_qp* const pair = std::exchange(pair_, nullptr);
  if (pair == nullptr) return;
  const Device& device = *path_.device;
  is_stuck_ = !device.has_ended(
      device.library().destroy_qp(pair),
      "a queue pair cannot be destroyed, so the memory that it may still write to is kept");
}

bool QueuePair::post_receive(std::uint64_t number, void* to, std::uint32_t bytes,
                             std::uint32_t key) noexcept {
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(to), bytes, key};
  ibv_recv_wr request{};
  request.wr_id = number;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  return pair_ != nullptr && ::ibv_post_recv(pair_, &request, &refused) == 0;
}

bool QueuePair::post_send(std::uint64_t number, const void* from, std::uint32_t bytes) noexcept {
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(from), bytes, 0};
  ibv_send_wr request{};
  request.wr_id = number;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_INLINE;
  return post(request);
}

bool QueuePair::post_write(std::uint64_t number, const Write& write) noexcept {
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(write.from), write.bytes, write.local_key};
  ibv_send_wr request{};
  request.wr_id = number;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = write.immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
  request.imm_data = htobe32(write.immediate.value_or(0));
  if (write.may_inline && write.bytes <= static_cast<std::uint32_t>(depths_.inline_bytes)) {
    request.send_flags = IBV_SEND_INLINE;
  }
  request.wr.rdma.remote_addr = write.to;
  request.wr.rdma.rkey = write.remote_key;
  return post(request);
}

bool QueuePair::post(ibv_send_wr& request) noexcept {
  ibv_send_wr* refused = nullptr;
  return pair_ != nullptr && ::ibv_post_send(pair_, &request, &refused) == 0;
}

}  // namespace weft::transport::verbs
