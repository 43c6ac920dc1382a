// What a tool sees: this program is its own NVTX injection, which records the calls that reach it.
#include <algorithm>
#include <cstring>
#include <map>
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
  std::string domain;
  std::map<std::uint32_t, std::string> categories;
  std::vector<std::string> events;                           // "push cuda copy", "pop", "mark engine step"
  std::vector<std::map<std::string, std::string>> payloads;  // by field name, of each event that had one
  std::vector<nvtxPayloadSchemaEntry_t> entries;
  std::uint64_t schema = 0;
};
Recording recording;

std::string text_of(nvtxStringHandle_t handle) { return handle ? reinterpret_cast<const char*>(handle) : ""; }

// Decodes a payload by the schema that was registered, as a tool does.
std::map<std::string, std::string> decode(const nvtxPayloadData_t& data) {
  std::map<std::string, std::string> fields;
  const auto* bytes = static_cast<const std::byte*>(data.payload);
  for (const auto& entry : recording.entries) {
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
      fields[entry.name] = text_of(value);
    }
  }
  return fields;
}

void record(const char* kind, const nvtxEventAttributes_t* event) {
  recording.events.push_back(
      std::string(kind) + " " + recording.categories[event->category] + " " +
      (event->messageType == NVTX_MESSAGE_TYPE_ASCII ? event->message.ascii : text_of(event->message.registered)));
  if (event->payloadType == NVTX_PAYLOAD_TYPE_EXT) {
    const auto* data = reinterpret_cast<const nvtxPayloadData_t*>(event->payload.ullValue);
    if (data->schemaId == recording.schema) recording.payloads.push_back(decode(*data));
  }
}

nvtxDomainHandle_t on_domain(const char* name) {
  recording.domain = name;
  return reinterpret_cast<nvtxDomainHandle_t>(&recording);
}
void on_category(nvtxDomainHandle_t, std::uint32_t category, const char* name) { recording.categories[category] = name; }
nvtxStringHandle_t on_string(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<char*>(text));
}
int on_push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  record("push", event);
  return 0;
}
int on_pop(nvtxDomainHandle_t) {
  recording.events.emplace_back("pop");
  return 0;
}
nvtxRangeId_t on_start(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  record("start", event);
  return 17;
}
void on_end(nvtxDomainHandle_t, nvtxRangeId_t range) { recording.events.push_back("end " + std::to_string(range)); }
void on_mark(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) { record("mark", event); }
std::uint64_t on_schema(nvtxDomainHandle_t, const nvtxPayloadSchemaAttr_t* schema) {
  recording.entries.assign(schema->entries, schema->entries + schema->numEntries);
  recording.schema = schema->schemaId;
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
  install(NVTX_CBID_CORE2_DomainNameCategoryA, &on_category);
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

TEST_F(Trace, RangesNestInTheDomainUnderTheirLayer) {
  {
    trace::Range outer(step);
    trace::Range inner(copy);
  }
  EXPECT_EQ(recording.domain, "weft");
  EXPECT_THAT(recording.events, ElementsAre("push engine step", "push cuda copy", "pop", "pop"));
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
  EXPECT_THAT(recording.events, ElementsAre("start engine all_reduce", "end 17"));
  ASSERT_EQ(recording.payloads.size(), 1u);
  EXPECT_EQ(recording.payloads[0]["Message size [bytes]"], "64");
  EXPECT_EQ(recording.payloads[0]["Rank"], "1");
  EXPECT_EQ(recording.payloads[0]["No. of ranks"], "3");
}

TEST_F(Trace, MarksAreOneEvent) {
  trace::mark(step);
  trace::mark(copy, {.bytes = 8});
  EXPECT_THAT(recording.events, ElementsAre("mark engine step", "mark cuda copy"));
  ASSERT_EQ(recording.payloads.size(), 1u);
  EXPECT_EQ(recording.payloads[0]["Message size [bytes]"], "8");
  EXPECT_EQ(recording.payloads[0]["Reduction operation"], "");
}

}  // namespace
}  // namespace weft
