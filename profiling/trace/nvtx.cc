// SPDX-License-Identifier: Apache-2.0
#if WEFT_HAVE_NVTX

#include <array>
#include <cstddef>
#include <iterator>
#include <map>
#include <string>

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/nvtx.h>

namespace weft::trace {

inline namespace enabled {

namespace {

// A Payload as the tool sees it, with the fields that only operations have.
struct Wire {
  std::uint64_t communicator = 0;
  std::uint64_t bytes = 0;
  nvtxStringHandle_t reduction = nullptr;
  std::int32_t rank = -1;
  std::int32_t ranks = -1;
  std::int32_t device = -1;
  std::int32_t root = -1;
  std::int32_t peer = -1;
};

constexpr nvtxPayloadSchemaEntry_t kWireEntries[] = {
    {0, NVTX_PAYLOAD_ENTRY_TYPE_UINT64, "NCCL communicator ID", nullptr, 0,
     offsetof(Wire, communicator), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_UINT64, "Message size [bytes]", nullptr, 0, offsetof(Wire, bytes),
     nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_NVTX_REGISTERED_STRING_HANDLE, "Reduction operation", nullptr, 0,
     offsetof(Wire, reduction), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "Rank", nullptr, 0, offsetof(Wire, rank), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "No. of ranks", nullptr, 0, offsetof(Wire, ranks), nullptr,
     nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "CUDA device", nullptr, 0, offsetof(Wire, device), nullptr,
     nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "Root", nullptr, 0, offsetof(Wire, root), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "Peer rank", nullptr, 0, offsetof(Wire, peer), nullptr,
     nullptr},
};

constexpr std::uint64_t kWireSchema =
    NVTX_PAYLOAD_SCHEMA_ID_STATIC_START;  // unique within our domain

// Makes a layer's domain with its schema. Null without a tool.
nvtxDomainHandle_t make_domain(Layer layer) {
  const std::string name = std::string("weft.") + trace::name(layer);
  const nvtxDomainHandle_t fresh = nvtxDomainCreateA(name.c_str());
  nvtxPayloadSchemaAttr_t schema{};
  schema.fieldMask =
      NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE |
      NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_ENTRIES | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NUM_ENTRIES |
      NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_STATIC_SIZE | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_SCHEMA_ID;
  schema.name = "weft operation";
  schema.type = NVTX_PAYLOAD_SCHEMA_TYPE_STATIC;
  schema.entries = kWireEntries;
  schema.numEntries = std::size(kWireEntries);
  schema.payloadStaticSize = sizeof(Wire);
  schema.schemaId = kWireSchema;
  nvtxPayloadSchemaRegister(fresh, &schema);
  return fresh;
}

// The layer's domain. The first call makes the domains of all layers.
nvtxDomainHandle_t domain(Layer layer) {
  static const auto made = [] {
    std::array<nvtxDomainHandle_t, kLayers> domains{};
    for (std::size_t i = 0; i < kLayers; ++i) domains[i] = make_domain(static_cast<Layer>(i));
    return domains;
  }();
  return made[static_cast<std::size_t>(layer)];
}

// Registers a text in a layer's domain. Texts are few and have static lifetime, so they are
// compared by address.
nvtxStringHandle_t registered(Layer layer, const char* text) {
  static constinit ForkMutex mutex(ForkOrder::Counts);
  static auto* const handles WEFT_POINTEE_GUARDED_BY(mutex) =
      new std::map<std::pair<Layer, const char*>, nvtxStringHandle_t>();
  {
    MutexLock lock(mutex);
    if (const auto found = handles->find({layer, text}); found != handles->end())
      return found->second;
  }
  const nvtxStringHandle_t made = nvtxDomainRegisterStringA(domain(layer), text);
  MutexLock lock(mutex);
  return handles->emplace(std::pair(layer, text), made).first->second;
}

// A communicator ID that is equal on all ranks of a group and differs for a group that is made
// again: FNV-1a of what the ranks have in common. (It is not NCCL's ID, which NCCL does not
// disclose.)
std::uint64_t communicator_of(const Member& member) {
  const MemberIdentity& party = *member.party();
  if (party.kind != "group") return 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  for (const char letter : party.name) mix(static_cast<unsigned char>(letter));
  for (const int rank : party.ranks) mix(static_cast<std::uint64_t>(rank));
  mix(member.generation());
  return hash;
}

}  // namespace

// The attributes of one event, and the memory they point to.
struct Attributes {
  explicit Attributes(Name& name) {
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    event.message.registered = handle(name);
  }

  Attributes(Name& name, const Payload& payload) : Attributes(name) {
    attach(name.layer(), payload);
  }
  Attributes(Layer layer, const char* text, const Payload& payload) {
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    event.message.registered = registered(layer, text);
    attach(layer, payload);
  }

  // Attaches the payload; registers its text in the domain of that layer.
  void attach(Layer layer, const Payload& payload) {
    const nvtxStringHandle_t reduction =
        *payload.reduction != '\0' ? registered(layer, payload.reduction) : nullptr;
    wire = {.bytes = payload.bytes,
            .reduction = reduction,
            .rank = payload.rank,
            .ranks = payload.ranks,
            .device = payload.device};
    data = {kWireSchema, sizeof wire, &wire};
    event.payloadType = NVTX_PAYLOAD_TYPE_EXT;
    event.reserved0 = 1;  // the number of payloads in `data`
    event.payload.ullValue = NVTX_POINTER_AS_PAYLOAD_ULLVALUE(&data);
  }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  const nvtxEventAttributes_t* get() const { return &event; }

  // Two threads may register a name at the same time; the tool then gives both the same handle or
  // two equal ones.
  static nvtxStringHandle_t handle(Name& name) {
    void* known = name.registered_.load(std::memory_order_acquire);
    if (known == nullptr) {
      known = nvtxDomainRegisterStringA(domain(name.layer_), name.text_);
      name.registered_.store(known, std::memory_order_release);
    }
    return static_cast<nvtxStringHandle_t>(known);
  }

  nvtxEventAttributes_t event{};
  nvtxPayloadData_t data{};
  Wire wire{};
};

}  // namespace enabled

namespace nvtx {

namespace {

// Passes the domain and the event to `call`, if there is a tool.
template <class Call>
void with(Name& name, const Payload* payload, const Call& call) {
  const nvtxDomainHandle_t where = domain(name.layer());
  if (where == nullptr) return;
  if (payload != nullptr) {
    call(where, Attributes(name, *payload).get());
  } else {
    call(where, Attributes(name).get());
  }
}

}  // namespace

void push(Name& name, const Payload* payload) noexcept {
  with(name, payload,
       [](nvtxDomainHandle_t where, const auto* event) { nvtxDomainRangePushEx(where, event); });
}

void pop(Layer layer) noexcept {
  if (const nvtxDomainHandle_t where = domain(layer)) nvtxDomainRangePop(where);
}

void mark(Name& name, const Payload* payload) noexcept {
  with(name, payload,
       [](nvtxDomainHandle_t where, const auto* event) { nvtxDomainMarkEx(where, event); });
}

std::uint64_t start(const Member& member, Kind kind, const About& about) noexcept {
  const nvtxDomainHandle_t where = domain(Layer::Engine);
  if (where == nullptr) return 0;
  const MemberIdentity& party = *member.party();
  Attributes attributes(Layer::Engine, about.name,
                        {.bytes = about.bytes,
                         .reduction = about.reduction,
                         .rank = party.rank,
                         .ranks = static_cast<std::int32_t>(party.ranks.size()),
                         .device = about.device});
  attributes.wire.communicator = communicator_of(member);
  (kind == Kind::Collective ? attributes.wire.root : attributes.wire.peer) = about.peer;
  return nvtxDomainRangeStartEx(where, attributes.get());
}

void stop(std::uint64_t range) noexcept {
  if (range != 0) nvtxDomainRangeEnd(domain(Layer::Engine), range);
}

}  // namespace nvtx

}  // namespace weft::trace

#endif
