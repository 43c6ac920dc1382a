// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

#include <weft/tests/harness/nvtx_tool.h>

namespace weft::harness {

namespace {

// The injection's state. Never destroyed, because threads may trace while the process ends.
struct Tool {
  std::mutex mutex;
  NvtxRecording recording;  // a domain's handle is its index in the list, from 1
  std::set<std::string> strings;
  std::map<std::string, std::vector<nvtxPayloadSchemaEntry_t>> entries;  // by domain
  std::map<std::string, std::uint64_t> schemas;
};
Tool& tool() {
  static auto& made = *new Tool();
  return made;
}

// The functions below require Tool::mutex.

std::string name_of(nvtxDomainHandle_t domain) {
  return tool().recording.domains.at(reinterpret_cast<std::uintptr_t>(domain) - 1);
}

// Returns a registered string without its domain.
std::string text_of(nvtxDomainHandle_t domain, nvtxStringHandle_t handle) {
  if (handle == nullptr) return "";
  const std::string& text = *reinterpret_cast<const std::string*>(handle);
  EXPECT_TRUE(tool().strings.contains(text)) << "not registered";
  EXPECT_EQ(text.substr(0, text.find(' ')), name_of(domain)) << "registered in another domain";
  return text.substr(text.find(' ') + 1);
}

// Decodes a payload by the registered schema, as a tool does.
std::map<std::string, std::string> decode(nvtxDomainHandle_t domain,
                                          const nvtxPayloadData_t& data) {
  EXPECT_EQ(data.schemaId, tool().schemas.at(name_of(domain)));
  std::map<std::string, std::string> fields;
  const auto* bytes = static_cast<const std::byte*>(data.payload);
  for (const auto& entry : tool().entries.at(name_of(domain))) {
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
  std::lock_guard lock(tool().mutex);
  ASSERT_EQ(event->messageType, NVTX_MESSAGE_TYPE_REGISTERED);
  NvtxRecording::Event seen{
      std::string(kind) + " " + name_of(domain) + " " + text_of(domain, event->message.registered),
      {}};
  if (event->payloadType == NVTX_PAYLOAD_TYPE_EXT) {
    seen.fields =
        decode(domain, *reinterpret_cast<const nvtxPayloadData_t*>(event->payload.ullValue));
  }
  tool().recording.events.push_back(std::move(seen));
}

// --- the functions that the injection puts into NVTX's tables

nvtxDomainHandle_t on_domain(const char* name) {
  std::lock_guard lock(tool().mutex);
  tool().recording.domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(tool().recording.domains.size());
}
nvtxStringHandle_t on_string(nvtxDomainHandle_t domain, const char* text) {
  std::lock_guard lock(tool().mutex);
  const std::string& kept = *tool().strings.insert(name_of(domain) + " " + text).first;
  ++tool().recording.registered[kept];
  return reinterpret_cast<nvtxStringHandle_t>(const_cast<std::string*>(&kept));
}
int on_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  record("push", domain, event);
  return 0;
}
int on_pop(nvtxDomainHandle_t domain) {
  std::lock_guard lock(tool().mutex);
  tool().recording.events.push_back({"pop " + name_of(domain), {}});
  return 0;
}
nvtxRangeId_t on_start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  record("start", domain, event);
  return 17;
}
void on_end(nvtxDomainHandle_t domain, nvtxRangeId_t range) {
  std::lock_guard lock(tool().mutex);
  tool().recording.events.push_back({"end " + name_of(domain) + " " + std::to_string(range), {}});
}
void on_mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  record("mark", domain, event);
}
std::uint64_t on_schema(nvtxDomainHandle_t domain, const nvtxPayloadSchemaAttr_t* schema) {
  std::lock_guard lock(tool().mutex);
  tool().entries[name_of(domain)].assign(schema->entries, schema->entries + schema->numEntries);
  tool().schemas[name_of(domain)] = schema->schemaId;
  return schema->schemaId;
}

int inject(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int count = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &count))
    return 0;
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
      segment.functionSlots[NVTX3EXT_CBID_nvtxPayloadSchemaRegister] =
          reinterpret_cast<std::intptr_t>(&on_schema);
    }
  }
  return 1;
}

}  // namespace

std::vector<std::string> NvtxRecording::texts() const {
  std::vector<std::string> texts;
  for (const Event& event : events) texts.push_back(event.text);
  return texts;
}

std::vector<std::map<std::string, std::string>> NvtxRecording::payloads(
    const std::string& text) const {
  std::vector<std::map<std::string, std::string>> payloads;
  for (const Event& event : events) {
    if (event.text == text) payloads.push_back(event.fields);
  }
  return payloads;
}

void attach_nvtx_tool() {
  InitializeInjectionNvtx2_fnptr = inject;
  InitializeInjectionNvtxExtension_fnptr = inject_payloads;
}

NvtxRecording take_nvtx_recording() {
  std::lock_guard lock(tool().mutex);
  NvtxRecording taken = std::move(tool().recording);
  tool().recording = {.domains = taken.domains, .registered = {}, .events = {}};
  return taken;
}

}  // namespace weft::harness
