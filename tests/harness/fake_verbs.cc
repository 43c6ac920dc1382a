// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include <endian.h>

#include <sys/eventfd.h>
#include <unistd.h>

#include <weft/tests/harness/fake_verbs.h>

namespace weft::harness {

using transport::verbs::Library;

namespace {

struct Region : ibv_mr {
  bool is_dma_buf = false;
  int access = 0;
  bool covers(std::uint64_t address, std::uint64_t bytes) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(addr);
    return address >= begin && bytes <= length && address - begin <= length - bytes;
  }
};

struct Queue : ibv_cq {
  std::deque<ibv_wc> waiting;
};

struct Pair : ibv_qp {
  std::deque<ibv_recv_wr> receives;
  std::vector<ibv_sge> receive_pieces;
  std::uint32_t peer = 0;
  int port = 0;
  bool is_cut = false;

  void complete(ibv_cq* queue, std::uint64_t number, ibv_wc_status status, ibv_wc_opcode opcode,
                std::uint32_t bytes = 0, std::uint32_t immediate = 0) const {
    ibv_wc completion{};
    completion.wr_id = number;
    completion.status = status;
    completion.opcode = opcode;
    completion.byte_len = bytes;
    completion.imm_data = htobe32(immediate);
    completion.qp_num = qp_num;
    static_cast<Queue*>(queue)->waiting.push_back(completion);
  }
};

// A request that is executed later, with a copy of its inline payload.
struct Held {
  Pair* pair = nullptr;
  ibv_send_wr request{};
  ibv_sge piece{};
  std::vector<std::byte> inlined;
};

}  // namespace

struct FakeVerbs::World {
  ibv_device device{};
  ibv_context context{};
  std::shared_ptr<Library> library = std::make_shared<Library>();
  std::mutex mutex;  // guards regions and refused
  std::map<std::uint32_t, std::unique_ptr<Region>> regions;
  std::map<std::uint32_t, Pair*> pairs;
  std::deque<Held> held;
  std::mutex saying;  // guards said and unacknowledged
  std::deque<ibv_async_event> said;
  std::size_t unacknowledged = 0;
  int ports = 1;
  std::uint32_t spoken_to = 0;  // the queue pair that receives `spoken` repeatedly
  std::vector<std::byte> spoken;
  std::size_t left_to_send = 0;
  std::map<FakeVerbs::Thing, int> refused;
  std::vector<std::unique_ptr<Queue>> stuck;
  std::size_t held_for = 0;  // empty polls until held requests are executed
  std::uint32_t next = 1;
  bool is_limited = false;
  bool refuses_dma_bufs = false;
  std::pair<std::uint64_t, std::uint64_t> read_only;  // begin and end
  std::function<std::byte*(const void*)> behind;
  std::function<void()> at_registration;
  std::function<void()> in_write;

  std::byte* look_at(std::uint64_t address) const {
    auto* const bytes = reinterpret_cast<std::byte*>(address);
    return behind ? behind(bytes) : bytes;
  }
  bool lets_at(std::uint32_t key, std::uint64_t address, std::uint64_t bytes, int access) {
    std::lock_guard lock(mutex);
    const auto region = regions.find(key);
    return region != regions.end() && region->second->covers(address, bytes) &&
           (region->second->access & access) == access;
  }
};

namespace {

using World = FakeVerbs::World;
// The running test's world; global, because the table's functions are plain functions.
World* the_world = nullptr;

int refusal(FakeVerbs::Thing thing) {
  std::lock_guard lock(the_world->mutex);
  return std::exchange(the_world->refused[thing], 0);
}

bool deliver(Pair& to, ibv_wc_opcode opcode, const void* bytes, std::uint32_t count,
             std::uint32_t immediate) {
  if (to.receives.empty()) return false;
  const ibv_recv_wr receive = to.receives.front();
  const ibv_sge piece = to.receive_pieces.front();
  to.receives.pop_front();
  to.receive_pieces.erase(to.receive_pieces.begin());
  if (count > piece.length) return false;
  if (count > 0 && !the_world->lets_at(piece.lkey, piece.addr, count, IBV_ACCESS_LOCAL_WRITE))
    return false;
  if (count > 0) std::memcpy(reinterpret_cast<void*>(piece.addr), bytes, count);
  to.complete(to.recv_cq, receive.wr_id, IBV_WC_SUCCESS, opcode, count, immediate);
  return true;
}

int carry_out(Pair& pair, const ibv_send_wr* request) {
  const auto peer = the_world->pairs.find(pair.peer);
  const ibv_sge& piece = *request->sg_list;
  const std::byte* const from = the_world->look_at(piece.addr);
  const auto finish = [&](ibv_wc_status status) {
    pair.complete(pair.send_cq, request->wr_id, status, IBV_WC_SEND);
    pair.is_cut |= status != IBV_WC_SUCCESS;
    return 0;
  };
  if (pair.is_cut) return finish(IBV_WC_WR_FLUSH_ERR);
  if (peer == the_world->pairs.end() || peer->second->is_cut) return finish(IBV_WC_RETRY_EXC_ERR);
  const bool may_read = (request->send_flags & IBV_SEND_INLINE) == 0
                            ? the_world->lets_at(piece.lkey, piece.addr, piece.length, 0)
                            : from == reinterpret_cast<const std::byte*>(piece.addr);
  if (!may_read) return finish(IBV_WC_LOC_PROT_ERR);
  if (request->opcode == IBV_WR_SEND) {
    return finish(deliver(*peer->second, IBV_WC_RECV, from, piece.length, 0)
                      ? IBV_WC_SUCCESS
                      : IBV_WC_RNR_RETRY_EXC_ERR);
  }
  if (!the_world->lets_at(request->wr.rdma.rkey, request->wr.rdma.remote_addr, piece.length,
                          IBV_ACCESS_REMOTE_WRITE)) {
    return finish(IBV_WC_REM_ACCESS_ERR);
  }
  std::byte* const to = the_world->look_at(request->wr.rdma.remote_addr);
  const std::uint32_t half = piece.length / 2;
  std::memcpy(to, from, half);
  if (const auto call = std::exchange(the_world->in_write, nullptr)) call();
  if (!the_world->pairs.contains(pair.peer)) return finish(IBV_WC_RETRY_EXC_ERR);
  std::memcpy(to + half, from + half, piece.length - half);
  const bool tells = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  if (tells &&
      !deliver(*peer->second, IBV_WC_RECV_RDMA_WITH_IMM, nullptr, 0, be32toh(request->imm_data))) {
    return finish(IBV_WC_RNR_RETRY_EXC_ERR);
  }
  return finish(IBV_WC_SUCCESS);
}

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr**) {
  auto& pair = *static_cast<Pair*>(qp);
  if (the_world->held_for == 0) return carry_out(pair, request);
  Held& held = the_world->held.emplace_back(Held{&pair, *request, *request->sg_list, {}});
  if ((request->send_flags & IBV_SEND_INLINE) == 0) return 0;
  const auto* const bytes = reinterpret_cast<const std::byte*>(held.piece.addr);
  held.inlined.assign(bytes, bytes + held.piece.length);
  held.piece.addr = reinterpret_cast<std::uintptr_t>(held.inlined.data());
  return 0;
}

void carry_out_held() {
  for (Held& held : std::exchange(the_world->held, {})) {
    held.request.sg_list = &held.piece;
    carry_out(*held.pair, &held.request);
  }
}

int post_recv(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr**) {
  auto& pair = *static_cast<Pair*>(qp);
  pair.receives.push_back(*request);
  pair.receive_pieces.push_back(*request->sg_list);
  if (pair.qp_num == the_world->spoken_to && !pair.is_cut && the_world->left_to_send > 0) {
    --the_world->left_to_send;
    deliver(pair, IBV_WC_RECV, the_world->spoken.data(),
            static_cast<std::uint32_t>(the_world->spoken.size()), 0);
  }
  return 0;
}

int poll_cq(ibv_cq* queue, int count, ibv_wc* to) {
  auto& waiting = static_cast<Queue*>(queue)->waiting;
  int taken = 0;
  for (; taken < count && !waiting.empty(); ++taken) {
    to[taken] = waiting.front();
    waiting.pop_front();
  }
  if (taken == 0 && the_world->held_for > 0 && --the_world->held_for == 0) carry_out_held();
  return taken;
}

ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  auto* const pair = new Pair{};
  pair->context = domain->context;
  pair->send_cq = attributes->send_cq;
  pair->recv_cq = attributes->recv_cq;
  pair->qp_num = the_world->next++;
  the_world->pairs[pair->qp_num] = pair;
  return pair;
}

int destroy_qp(ibv_qp* qp) {
  if (const int error = refusal(FakeVerbs::Thing::QueuePair)) return error;
  the_world->pairs.erase(qp->qp_num);
  std::erase_if(the_world->held, [&](const Held& held) { return held.pair == qp; });
  delete static_cast<Pair*>(qp);
  return 0;
}

int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int) {
  auto& pair = *static_cast<Pair*>(qp);
  if (attributes->qp_state == IBV_QPS_INIT) pair.port = attributes->port_num;
  if (attributes->qp_state == IBV_QPS_RTR) pair.peer = attributes->dest_qp_num;
  if (attributes->qp_state == IBV_QPS_ERR) pair.is_cut = true;
  return 0;
}

ibv_mr* reg_mr(ibv_pd*, void* address, std::size_t bytes, int access) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto& [from, to] = the_world->read_only;
  const bool is_read_only = access != 0 && begin < to && from < begin + bytes;
  if (the_world->is_limited || is_read_only) {
    errno = is_read_only ? EFAULT : ENOMEM;
    return nullptr;
  }
  if (const auto call = std::exchange(the_world->at_registration, nullptr)) call();
  auto region = std::make_unique<Region>();
  region->addr = address;
  region->length = bytes;
  region->access = access;
  std::lock_guard lock(the_world->mutex);
  region->lkey = region->rkey = the_world->next++;
  auto* const made = region.get();
  the_world->regions[made->lkey] = std::move(region);
  return made;
}

ibv_mr* reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                      std::uint64_t address, int file, int access) {
  if (the_world->refuses_dma_bufs) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  std::uint64_t where[2];  // address and bytes, as the fake driver wrote them
  if (::pread(file, where, sizeof where, 0) != sizeof where) return nullptr;
  if (offset > where[1] || bytes > where[1] - offset || address != where[0] + offset) {
    errno = EINVAL;
    return nullptr;
  }
  auto* const made = reg_mr(domain, reinterpret_cast<void*>(address), bytes, access);
  if (made == nullptr) return nullptr;
  std::lock_guard lock(the_world->mutex);
  static_cast<Region*>(made)->is_dma_buf = true;
  return made;
}

int dereg_mr(ibv_mr* region) {
  if (const int error = refusal(FakeVerbs::Thing::Registration)) return error;
  std::lock_guard lock(the_world->mutex);
  the_world->regions.erase(region->lkey);
  return 0;
}

ibv_comp_channel* create_channel(ibv_context*) {
  auto* const channel = new ibv_comp_channel{};
  channel->fd = ::eventfd(0, EFD_CLOEXEC);  // never signalled: something else wakes a parked loop
  return channel;
}

int destroy_channel(ibv_comp_channel* channel) {
  ::close(channel->fd);
  delete channel;
  return 0;
}

void fill(Library& library) {
  library.get_device_name = [](ibv_device*) -> const char* { return "fake0"; };
  library.open_device = [](ibv_device*) { return &the_world->context; };
  library.close_device = [](ibv_context*) { return 0; };
  library.query_device = [](ibv_context*, ibv_device_attr* limits) {
    limits->max_qp_wr = 1024;
    limits->phys_port_cnt = static_cast<std::uint8_t>(the_world->ports);
    return 0;
  };
  library.query_port = [](ibv_context*, std::uint8_t, _compat_ibv_port_attr* to) {
    auto& port = *reinterpret_cast<ibv_port_attr*>(to);
    port.state = IBV_PORT_ACTIVE;
    port.link_layer = IBV_LINK_LAYER_ETHERNET;
    port.active_mtu = IBV_MTU_4096;
    port.max_msg_sz = 1 << 30;
    return 0;
  };
  library.query_gid_table = [](ibv_context*, ibv_gid_entry* to, std::size_t, std::uint32_t,
                               std::size_t) -> ssize_t {
    for (int port = 1; port <= the_world->ports; ++port, ++to) {
      *to = {};
      to->port_num = static_cast<std::uint32_t>(port);
      to->gid_type = IBV_GID_TYPE_ROCE_V2;
      const std::uint8_t address[] = {0xff, 0xff, 192, 0, 2, static_cast<std::uint8_t>(port)};
      std::memcpy(to->gid.raw + 10, address, sizeof address);
    }
    return the_world->ports;
  };
  library.port_state_str = [](ibv_port_state) -> const char* { return "a state"; };
  library.alloc_pd = [](ibv_context* context) {
    auto* const domain = new ibv_pd{};
    domain->context = context;
    return domain;
  };
  library.dealloc_pd = [](ibv_pd* domain) {
    delete domain;
    return 0;
  };
  library.reg_mr = reg_mr;
  library.reg_dmabuf_mr = reg_dmabuf_mr;
  library.dereg_mr = dereg_mr;
  library.create_comp_channel = create_channel;
  library.destroy_comp_channel = destroy_channel;
  library.get_cq_event = [](ibv_comp_channel*, ibv_cq**, void**) { return -1; };
  library.get_async_event = [](ibv_context* context, ibv_async_event* to) {
    eventfd_t one = 0;
    if (::eventfd_read(context->async_fd, &one) != 0) return -1;
    std::lock_guard lock(the_world->saying);
    *to = the_world->said.front();
    the_world->said.pop_front();
    return 0;
  };
  library.ack_async_event = [](ibv_async_event*) {
    std::lock_guard lock(the_world->saying);
    --the_world->unacknowledged;
  };
  library.event_type_str = [](ibv_event_type) -> const char* { return "an event"; };
  library.create_cq = [](ibv_context* context, int, void*, ibv_comp_channel*, int) -> ibv_cq* {
    auto* const queue = new Queue{};
    queue->context = context;
    return queue;
  };
  library.destroy_cq = [](ibv_cq* queue) {
    std::unique_ptr<Queue> gone(static_cast<Queue*>(queue));
    const int error = refusal(FakeVerbs::Thing::CompletionQueue);
    if (error != 0) the_world->stuck.push_back(std::move(gone));
    return error;
  };
  library.create_qp = create_qp;
  library.destroy_qp = destroy_qp;
  library.modify_qp = modify_qp;
  library.wc_status_str = [](ibv_wc_status) -> const char* { return "a status"; };
}

}  // namespace

FakeVerbs::FakeVerbs() : world_(std::make_unique<World>()) {
  the_world = world_.get();
  fill(*world_->library);
  world_->context.device = &world_->device;
  world_->context.async_fd = ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  world_->device.transport_type = IBV_TRANSPORT_IB;
  world_->context.ops.post_send = post_send;
  world_->context.ops.post_recv = post_recv;
  world_->context.ops.poll_cq = poll_cq;
  world_->context.ops.req_notify_cq = [](ibv_cq*, int) { return 0; };
}

FakeVerbs::~FakeVerbs() {
  // Pairs that could not be destroyed.
  for (const auto& [number, pair] : world_->pairs) delete pair;
  ::close(world_->context.async_fd);
  the_world = nullptr;
}

std::shared_ptr<transport::verbs::Device> FakeVerbs::open() const {
  return std::make_shared<transport::verbs::Device>(world_->library, &world_->device);
}

transport::verbs::Path FakeVerbs::path() const {
  transport::verbs::Path path;
  path.device = open();
  path.choice.port.device = "fake0";
  path.choice.port.active = true;
  path.choice.port.fabric = transport::verbs::Fabric::Roce;
  path.choice.port.mtu_bytes = 4096;
  path.choice.port.max_message = 1 << 30;
  return path;
}

void FakeVerbs::give_ports(int count) { world_->ports = count; }

std::vector<int> FakeVerbs::ports_in_use() const {
  std::vector<int> ports;
  for (const auto& [number, pair] : world_->pairs) ports.push_back(pair->port);
  return ports;
}

std::size_t FakeVerbs::registrations() const {
  std::lock_guard lock(world_->mutex);
  return world_->regions.size();
}

std::vector<Slice> FakeVerbs::registered() const {
  std::lock_guard lock(world_->mutex);
  std::vector<Slice> memory;
  for (const auto& [key, region] : world_->regions)
    memory.push_back({region->addr, region->length, Device::host()});
  return memory;
}

void FakeVerbs::look_through(std::function<std::byte*(const void*)> behind) {
  world_->behind = std::move(behind);
}

void FakeVerbs::at_next_registration(std::function<void()> call) {
  world_->at_registration = std::move(call);
}

void FakeVerbs::in_the_next_write(std::function<void()> call) {
  world_->in_write = std::move(call);
}

void FakeVerbs::refuse_to_end(Thing thing, int error) {
  std::lock_guard lock(world_->mutex);
  world_->refused[thing] = error;
}

std::size_t FakeVerbs::queue_pairs() const { return world_->pairs.size(); }

void FakeVerbs::go_on_sending(std::uint32_t queue_pair, const void* bytes, std::size_t count,
                              std::size_t times) {
  const auto* const begin = static_cast<const std::byte*>(bytes);
  world_->spoken.assign(begin, begin + count);
  world_->spoken_to = queue_pair;
  world_->left_to_send = times;
  send_to(queue_pair, bytes, count);
}

std::size_t FakeVerbs::left_to_send() const { return world_->left_to_send; }

std::uint32_t FakeVerbs::newest_pair() const { return world_->pairs.rbegin()->first; }

void FakeVerbs::say(ibv_event_type event, std::uint32_t queue_pair) {
  ibv_async_event said{};
  said.event_type = event;
  if (queue_pair != 0) said.element.qp = world_->pairs.at(queue_pair);
  {
    std::lock_guard lock(world_->saying);
    world_->said.push_back(said);
    ++world_->unacknowledged;
  }
  ::eventfd_write(world_->context.async_fd, 1);
}

std::size_t FakeVerbs::unacknowledged() const {
  std::lock_guard lock(world_->saying);
  return world_->unacknowledged;
}

void FakeVerbs::hold(std::size_t polls) { world_->held_for = polls; }

void FakeVerbs::refuse_dma_bufs(bool is_refusing) { world_->refuses_dma_bufs = is_refusing; }

std::size_t FakeVerbs::dma_bufs() const {
  std::lock_guard lock(world_->mutex);
  return static_cast<std::size_t>(std::ranges::count_if(
      world_->regions, [](const auto& entry) { return entry.second->is_dma_buf; }));
}

void FakeVerbs::map_read_only(const void* address, std::size_t bytes) {
  const auto from = reinterpret_cast<std::uintptr_t>(address);
  world_->read_only = {from, from + bytes};
}

void FakeVerbs::limit_locked_memory(bool is_limited) { world_->is_limited = is_limited; }

std::size_t FakeVerbs::receives_of(std::uint32_t queue_pair) const {
  return world_->pairs.at(queue_pair)->receives.size();
}

bool FakeVerbs::send_to(std::uint32_t queue_pair, const void* bytes, std::size_t count) const {
  return deliver(*world_->pairs.at(queue_pair), IBV_WC_RECV, bytes,
                 static_cast<std::uint32_t>(count), 0);
}

bool FakeVerbs::write_to(std::uint32_t queue_pair, std::uint32_t immediate) const {
  return deliver(*world_->pairs.at(queue_pair), IBV_WC_RECV_RDMA_WITH_IMM, nullptr, 0, immediate);
}

}  // namespace weft::harness
