#if WEFT_HAVE_NVTX

#include <cstddef>
#include <iterator>

#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <weft/profiling/trace/nvtx.h>

namespace weft::trace {

inline namespace enabled {

namespace {

// A Payload as the tool sees it.
struct Wire {
  std::uint64_t bytes;
  nvtxStringHandle_t operation;
  std::int32_t rank;
  std::int32_t ranks;
  std::int32_t device;
};

constexpr nvtxPayloadSchemaEntry_t kWireEntries[] = {
    {0, NVTX_PAYLOAD_ENTRY_TYPE_UINT64, "Message size [bytes]", nullptr, 0, offsetof(Wire, bytes), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_NVTX_REGISTERED_STRING_HANDLE, "Reduction operation", nullptr, 0, offsetof(Wire, operation),
     nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "Rank", nullptr, 0, offsetof(Wire, rank), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "No. of ranks", nullptr, 0, offsetof(Wire, ranks), nullptr, nullptr},
    {0, NVTX_PAYLOAD_ENTRY_TYPE_INT32, "CUDA device", nullptr, 0, offsetof(Wire, device), nullptr, nullptr},
};

constexpr std::uint64_t kWireSchema = NVTX_PAYLOAD_SCHEMA_ID_STATIC_START;  // unique within our domain

// The domain, made with its categories and its schema when something is first traced. Null without a tool.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = [] {
    const nvtxDomainHandle_t fresh = nvtxDomainCreateA("weft");
    const char* const layers[] = {"base", "cuda", "kernels", "transport", "engine", "user"};
    for (std::uint32_t i = 0; i < std::size(layers); ++i) nvtxDomainNameCategoryA(fresh, i + 1, layers[i]);
    nvtxPayloadSchemaAttr_t schema{};
    schema.fieldMask = NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_NAME | NVTX_PAYLOAD_SCHEMA_ATTR_FIELD_TYPE |
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
  }();
  return made;
}

}  // namespace

// The attributes of one event, and the memory they point to.
struct Attributes {
  explicit Attributes(Name& name) {
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.category = static_cast<std::uint32_t>(name.layer_);
    event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    event.message.registered = handle(name);
  }

  Attributes(Name& name, const Payload& payload) : Attributes(name) { attach(payload); }
  // A text that is not registered: of operations, whose names are many.
  Attributes(Layer layer, const char* text, const Payload& payload) {
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.category = static_cast<std::uint32_t>(layer);
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = text;
    attach(payload);
  }

  void attach(const Payload& payload) {
    wire = {payload.bytes, payload.operation ? handle(*payload.operation) : nullptr, payload.rank, payload.ranks,
            payload.device};
    data = {kWireSchema, sizeof wire, &wire};
    event.payloadType = NVTX_PAYLOAD_TYPE_EXT;
    event.reserved0 = 1;  // payloads in the array that follows
    event.payload.ullValue = NVTX_POINTER_AS_PAYLOAD_ULLVALUE(&data);
  }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  const nvtxEventAttributes_t* get() const { return &event; }

  // Two threads may register a name at once; the tool then gives both the same or two equal handles.
  static nvtxStringHandle_t handle(Name& name) {
    void* known = name.registered_.load(std::memory_order_acquire);
    if (known == nullptr) {
      known = nvtxDomainRegisterStringA(domain(), name.text_);
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

template <class Call>
void with(Name& name, const Payload* payload, const Call& call) {
  if (payload != nullptr) {
    call(Attributes(name, *payload).get());
  } else {
    call(Attributes(name).get());
  }
}

}  // namespace

void push(Name& name, const Payload* payload) noexcept {
  with(name, payload, [](const nvtxEventAttributes_t* event) { nvtxDomainRangePushEx(domain(), event); });
}

void pop() noexcept { nvtxDomainRangePop(domain()); }

void mark(Name& name, const Payload* payload) noexcept {
  with(name, payload, [](const nvtxEventAttributes_t* event) { nvtxDomainMarkEx(domain(), event); });
}

std::uint64_t start(Layer layer, const char* text, const Payload& payload) noexcept {
  if (domain() == nullptr) return 0;  // no tool
  return nvtxDomainRangeStartEx(domain(), Attributes(layer, text, payload).get());
}

void stop(std::uint64_t range) noexcept {
  if (range != 0) nvtxDomainRangeEnd(domain(), range);
}

}  // namespace nvtx

}  // namespace weft::trace

#endif
