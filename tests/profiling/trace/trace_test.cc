// What a tool sees: this program is its own NVTX injection, which records the calls that reach it.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft {
namespace {

using testing::ElementsAre;

// What the injection recorded. One thread, so no lock.
struct Recording {
  std::vector<std::string> domains;                                      // a handle is a place here, from 1
  std::map<std::string, int> registered;                                 // "weft.cuda copy", and how often
  std::vector<std::string> events;                                       // "push weft.cuda copy", "pop weft.cuda"
  std::vector<std::map<std::string, std::string>> payloads;              // by field name, of each event that had one
  std::map<std::string, std::vector<nvtxPayloadSchemaEntry_t>> entries;  // by domain
  std::map<std::string, std::uint64_t> schemas;
};
Recording recording;

std::string name_of(nvtxDomainHandle_t domain) {
  return recording.domains.at(reinterpret_cast<std::uintptr_t>(domain) - 1);
}

// A string as it was registered: "weft.cuda copy".
std::set<std::string> strings;
std::string text_of(nvtxDomainHandle_t domain, nvtxStringHandle_t handle) {
  if (handle == nullptr) return "";
  const std::string& text = *reinterpret_cast<const std::string*>(handle);
  EXPECT_TRUE(strings.contains(text)) << "not registered";
  EXPECT_EQ(text.substr(0, text.find(' ')), name_of(domain)) << "registered in another domain";
  return text.substr(text.find(' ') + 1);
}

// Decodes a payload by the schema that was registered, as a tool does.
std::map<std::string, std::string> decode(nvtxDomainHandle_t domain, const nvtxPayloadData_t& data) {
  std::map<std::string, std::string> fields;
  const auto* bytes = static_cast<const std::byte*>(data.payload);
  for (const auto& entry : recording.entries.at(name_of(domain))) {
    const auto* at = bytes + entry.offset;
    if (entry.type == NVTX_PAYLOAD_ENTRY_TYPE_UINT64) {
      std::uint64_t value = 0;
      std::memcpy(&value, at, sizeof value);
      fields[entry.name] = std::to_string(value);
    } else if (entry.type == NVTX_PAYLOAD_ENTRY_TYPE_INT32) {
      std::int32_t value = 0;
      std::memcpy(&value, at, sizeof value);
      fields[entry.name] = std::to_string(value);
    } else {
      nvtxStringHandle_t value = nullptr;
      std::memcpy(&value, at, sizeof value);
      fields[entry.name] = text_of(domain, value);
    }
  }
  return fields;
}

void record(const char* kind, nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  ASSERT_EQ(event->messageType, NVTX_MESSAGE_TYPE_REGISTERED);
  recording.events.push_back(std::string(kind) + " " + name_of(domain) + " " + text_of(domain, event->message.registered));
  if (event->payloadType == NVTX_PAYLOAD_TYPE_EXT) {
    const auto* data = reinterpret_cast<const nvtxPayloadData_t*>(event->payload.ullValue);
    ASSERT_EQ(data->schemaId, recording.schemas.at(name_of(domain)));
    recording.payloads.push_back(decode(domain, *data));
  }
}

nvtxDomainHandle_t on_domain(const char* name) {
  recording.domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(recording.domains.size());
}
nvtxStringHandle_t on_string(nvtxDomainHandle_t domain, const char* text) {
  const std::string& kept = *strings.insert(name_of(domain) + " " + text).first;
  ++recording.registered[kept];
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<std::string*>(&kept));
}
int on_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  record("push", domain, event);
  return 0;
}
int on_pop(nvtxDomainHandle_t domain) {
  recording.events.emplace_back("pop " + name_of(domain));
  return 0;
}
nvtxRangeId_t on_start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  record("start", domain, event);
  return 17;
}
void on_end(nvtxDomainHandle_t domain, nvtxRangeId_t range) {
  recording.events.push_back("end " + name_of(domain) + " " + std::to_string(range));
}
void on_mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) { record("mark", domain, event); }
std::uint64_t on_schema(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t* schema) {
  recording.entries[name_of(domain)].assign(schema->entries, schema->entries + schema->numEntries);
  recording.schemas[name_of(domain)] = schema->schemaId;
  return schema->schemaId;
}

int inject(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int count = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &count)) return 0;
  const auto install = [&](NvtxCallbackIdCore2 id, auto* function) {
    *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  install(NVTX_CBID_CORE2_DomainCreateA, &on_domain);
  install(NVTX_CBID_CORE2_DomainRegisterStringA, &on_string);
  install(NVTX_CBID_CORE2_DomainRangePushEx, &on_push);
  install(NVTX_CBID_CORE2_DomainRangePop, &on_pop);
  install(NVTX_CBID_CORE2_DomainRangeStartEx, &on_start);
  install(NVTX_CBID_CORE2_DomainRangeEnd, &on_end);
  install(NVTX_CBID_CORE2_DomainMarkEx, &on_mark);
  return 1;
}

int inject_payloads(nvtxExtModuleInfo_t* module) {
  for (std::size_t i = 0; i < module->segmentsCount; ++i) {
    auto& segment = module->segments[i];
    if (segment.slotCount > NVTX3EXT_CBID_nvtxPayloadSchemaRegister) {
      segment.functionSlots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] = reinterpret_cast<std::intptr_t>(&on_schema);
    }
  }
  return 1;
}

constinit trace::Name copy{trace::Layer::Cuda, "copy"};
constinit trace::Name step{trace::Layer::Engine, "step"};
constinit trace::Name sum{trace::Layer::Transport, "sum"};
constinit trace::Name only_here{trace::Layer::User, "only here"};

class Trace : public testing::Test {
 protected:
  // NVTX looks for these two pointers when something is first traced.
  static void SetUpTestSuite() {
    InitializeInjectionNvtx2_fnptr = inject;
    InitializeInjectionNvtxExtension_fnptr = inject_payloads;
  }
  void SetUp() override {
    recording.events.clear();
    recording.payloads.clear();
  }
};

TEST_F(Trace, RangesNestInTheDomainOfTheirLayer) {
  {
    trace::Range outer(step);
    trace::Range inner(copy);
  }
  EXPECT_THAT(recording.domains,
              ElementsAre("weft.base", "weft.cuda", "weft.kernels", "weft.transport", "weft.engine", "weft.user"));
  EXPECT_THAT(recording.events,
              ElementsAre("push weft.engine step", "push weft.cuda copy", "pop weft.cuda", "pop weft.engine"));
  EXPECT_TRUE(recording.payloads.empty());
}

TEST_F(Trace, PayloadHasNcclsFieldNames) {
  { trace::Range range(copy, {.bytes = 4096, .operation = &sum, .rank = 1, .ranks = 2, .device = 3}); }
  ASSERT_EQ(recording.payloads.size(), 1u);
  const std::map<std::string, std::string> expected{{"Message size [bytes]", "4096"},
                                                    {"Reduction operation", "sum"},
                                                    {"Rank", "1"},
                                                    {"No. of ranks", "2"},
                                                    {"CUDA device", "3"}};
  EXPECT_EQ(recording.payloads[0], expected);
}

TEST_F(Trace, OperationsAreRangesThatMayEndOnAnotherThread) {
  const trace::Member member = trace::Member::join({"group", "default", 1, {0, 1, 2}});
  trace::Operation operation =
      trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce", .bytes = 64});
  operation.end();
  EXPECT_THAT(recording.events, ElementsAre("start weft.engine all_reduce", "end weft.engine 17"));
  ASSERT_EQ(recording.payloads.size(), 1u);
  EXPECT_EQ(recording.payloads[0]["Message size [bytes]"], "64");
  EXPECT_EQ(recording.payloads[0]["Rank"], "1");
  EXPECT_EQ(recording.payloads[0]["No. of ranks"], "3");
}

TEST_F(Trace, NamesAreRegisteredOnceInEachDomain) {
  const trace::Member member = trace::Member::join({"group", "default", 0, {0}});
  recording.registered.clear();
  for (int i = 0; i < 3; ++i) {
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "barrier"}).end();
    trace::Range range(only_here, {.operation = &sum});
  }
  EXPECT_EQ(recording.registered.at("weft.engine barrier"), 1);
  EXPECT_EQ(recording.registered.at("weft.user only here"), 1);
  EXPECT_EQ(recording.registered.at("weft.user sum"), 1) << "of a payload: in the domain of its event";
  EXPECT_EQ(recording.events.size(), 12u);
}

TEST_F(Trace, MarksAreOneEvent) {
  trace::mark(step);
  trace::mark(copy, {.bytes = 8});
  EXPECT_THAT(recording.events, ElementsAre("mark weft.engine step", "mark weft.cuda copy"));
  ASSERT_EQ(recording.payloads.size(), 1u);
  EXPECT_EQ(recording.payloads[0]["Message size [bytes]"], "8");
  EXPECT_EQ(recording.payloads[0]["Reduction operation"], "");
}

}  // namespace
}  // namespace weft
