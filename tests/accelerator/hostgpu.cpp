// An accelerator made of host memory: torch's `privateuseone` device, computing with the CPU's kernels.
//
// Its tensors share their bytes with tensors of the CPU for as long as an operation lasts, so results
// have the CPU's bits. Like a GPU it refuses operands on several devices, has generators of its own,
// runs backward passes in a thread for each device, cannot be used after a fork, and makes the host
// wait where CUDA does; `waits` counts these.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace at::autocast {  // of ATen/autocast_mode.h, which takes long to compile
TORCH_API at::Tensor cached_cast(at::ScalarType, const at::Tensor&, c10::DeviceType);
TORCH_API at::ScalarType get_autocast_dtype(c10::DeviceType);
}  // namespace at::autocast

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr c10::DeviceIndex kCount = 8;

std::mutex mutex;
bool has_begun = false, is_bad_fork = false;
auto& counted = *new std::map<std::string, int64_t>;
PyObject* listener = nullptr;
thread_local c10::DeviceIndex current = 0;

// Notes that the host waits for the device, as `torch.cuda.set_sync_debug_mode` would.
void wait(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++counted[why];
  }
  if (listener != nullptr) {
    pybind11::gil_scoped_acquire gil;
    pybind11::handle called(listener);
    called(pybind11::str(why));
  }
}

// Streams. What is given to one is done at once, so a race gives the right bits; so it is refused: to
// read on one stream what was copied on another, unless an event of that one was waited for, and to
// free memory of one that another has used, without a word to the allocator (`record_stream`).
thread_local c10::StreamId stream_of_thread = 0;
auto& given = *new std::map<c10::StreamId, int64_t>;                                  // copies of each stream
std::map<std::pair<c10::StreamId, c10::StreamId>, int64_t> waited;       // as far as the first has seen the second
struct Copied { c10::StreamId stream; int64_t number; std::set<c10::StreamId> used, recorded; };
auto& copied = *new std::map<const void*, Copied>;
struct Recorded { c10::StreamId stream; int64_t number; };
c10::StreamId num_streams = 0;

void note_copy(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  if (stream_of_thread == 0) { copied.erase(data); return; }
  copied[data] = {stream_of_thread, ++given[stream_of_thread], {}, {}};
}

void note_use(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = copied.find(data);
  if (found == copied.end() || found->second.stream == stream_of_thread) return;
  auto& copy = found->second;
  auto seen = waited[{stream_of_thread, copy.stream}];
  TORCH_CHECK(seen >= copy.number, "a race: read before its copy on another stream was waited for");
  copy.used.insert(stream_of_thread);
}

void note_end(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = copied.find(data);
  if (found == copied.end()) return;
  for (auto used : found->second.used)
    if (!found->second.recorded.count(used)) ++counted["race: freed while another stream reads it"];
  copied.erase(found);
}

// Transfers that the device's one stream waits for.
std::condition_variable settled;
int under_way = 0;

void settle() {
  std::unique_lock<std::mutex> lock(mutex);
  if (under_way == 0) return;
  lock.unlock();
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  lock.lock();
  settled.wait(lock, [] { return under_way == 0; });
}

void begin() {
  TORCH_CHECK(
      !is_bad_fork,
      "Cannot re-initialize the accelerator in forked subprocess: its context began before the fork");
  if (has_begun) return;
  has_begun = true;
  pthread_atfork(nullptr, nullptr, [] { is_bad_fork = true; });
}

void synchronize() {
  wait("synchronize");
  settle();
}

// Memory.

struct Used { size_t now = 0, peak = 0; };
// Never destroyed: tensors may be freed when the process ends.
auto& memory = *new std::map<c10::DeviceIndex, Used>;
auto& sizes = *new std::map<const void*, std::pair<c10::DeviceIndex, size_t>>;

size_t total() {
  const char* given = std::getenv("HOSTGPU_BYTES");
  return given ? std::strtoull(given, nullptr, 10) : size_t(1) << 40;
}

void take(c10::DeviceIndex index, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& used = memory[index];
  if (used.now + size > total())
    C10_THROW_ERROR(OutOfMemoryError, c10::str("hostgpu out of memory. Tried to allocate ", size, " bytes"));
  used.now += size;
  used.peak = std::max(used.peak, used.now);
}

void give_back(c10::DeviceIndex index, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  memory[index].now -= size;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    begin();
    take(current, size);
    auto host = c10::GetAllocator(c10::kCPU)->allocate(size);
    auto* data = host.release_context();
    std::lock_guard<std::mutex> lock(mutex);
    sizes[data] = {current, size};
    return {data, data, raw_deleter(), {kDevice, current}};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      note_end(data);
      {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = sizes.find(data);
        if (found != sizes.end()) {
          memory[found->second.first].now -= found->second.second;
          sizes.erase(found);
        }
      }
      c10::GetAllocator(c10::kCPU)->raw_deleter()(data);
    };
  }
  bool initialized() override { return has_begun; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      each->current = memory[device].now;
      each->peak = memory[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    memory[device].peak = memory[device].now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex);
    return {total() - memory[device].now, total()};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

std::set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    begin();
    auto* data = c10::GetAllocator(c10::kCPU)->allocate(size).release_context();
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(data);
    return {data, data, raw_deleter(), c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        pinned.erase(data);
      }
      c10::GetAllocator(c10::kCPU)->raw_deleter()(data);
    };
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} pinned_allocator;

void release(void* storage) {
  delete static_cast<c10::Storage*>(storage);
}

// The same bytes, said to lie on another device.
c10::Storage renamed(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(storage);
  c10::DataPtr data(kept->mutable_data(), kept, &release, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

// Memory that a kernel of the CPU has allocated, as memory of the device.
struct Adopted { c10::Storage storage; c10::DeviceIndex index; size_t size; };

c10::Storage adopted(const c10::Storage& storage, c10::Device device) {
  take(device.index(), storage.nbytes());
  auto* kept = new Adopted{storage, device.index(), storage.nbytes()};
  auto end = [](void* given) {
    auto* kept = static_cast<Adopted*>(given);
    note_end(kept->storage.data());
    give_back(kept->index, kept->size);
    delete kept;
  };
  c10::DataPtr data(kept->storage.mutable_data(), kept, end, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &device_allocator, true);
}

at::Tensor on(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

// Random numbers: those that a generator of the CPU with the same seed draws.

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl({kDevice, index}, c10::DispatchKeySet(kKey)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
    offset = 0;
  }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->inner = inner.clone();
    made->offset = offset;
    return made;
  }
  at::Generator inner;
  uint64_t offset = 0;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex n = 0; n < kCount; ++n)
      made.push_back(at::make_generator<DeviceGenerator>(n));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

// What torch asks about devices.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kCount, "there is no ", device);
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, stream_of_thread);
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    c10::DeviceIndex index = device.index() < 0 ? current : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), id);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++num_streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    stream_of_thread = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(
      void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    std::lock_guard<std::mutex> lock(mutex);
    *event = new Recorded{on.id(), given[on.id()]};
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event == nullptr) return;
    auto* made = static_cast<Recorded*>(event);
    std::lock_guard<std::mutex> lock(mutex);
    auto& seen = waited[{on.id(), made->stream}];
    seen = std::max(seen, made->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  // What the stream was given before an event is done: only transfers take their time.
  void synchronizeEvent(void*) const override { wait("event"); }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return has_begun; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kDevice, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kDevice, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = pinned.upper_bound(data);
    if (after == pinned.begin()) return false;
    return *--after == data;  // views into the middle count as pageable
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};

// Operations.

// Those whose shape of the result depends on values, or that return a number.
const std::set<std::string> waiting = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave", "aten::bincount",
    "aten::is_nonzero", "aten::linalg_eig", "aten::histc"};
// Those that take positions in host memory too.
const std::set<std::string> indexing = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::index_put", "aten::_unsafe_index_put"};

// One call of an operation on tensors of the CPU that share their memory with those of the device.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema = op.schema();
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> views;  // of the device, and of the CPU

  void find(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    auto there = tensor.device();
    if (there.type() != kDevice) {
      bool may_be_host = tensor.dim() == 0 || indexing.count(schema.name());
      if (!may_be_host) host = there;
    } else if (!device) {
      device = there;
    } else {
      TORCH_CHECK(
          *device == there, schema.name(), ": Expected all tensors to be on the same device, but found ",
          "at least two devices, ", *device, " and ", there, "!");
    }
  }
  void check() {
    TORCH_CHECK(
        !device || !host, schema.name(), ": Expected all tensors to be on the same device, but found ",
        "at least two devices, ", *device, " and ", *host, "!");
  }
  at::Tensor view(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    for (auto& [there, here] : views)
      if (there.is_same(tensor)) return here;
    c10::Storage storage;
    for (auto& [there, here] : views)
      if (there.storage().is_alias_of(tensor.storage())) storage = here.storage();
    if (!storage) storage = renamed(tensor.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU));
    note_use(tensor.storage().data());
    views.emplace_back(tensor, on(storage, tensor, c10::DispatchKey::CPU));
    return views.back().second;
  }
  at::Tensor back(const at::Tensor& made) {
    if (!made.defined()) return made;
    for (auto& [there, here] : views)
      if (here.is_same(made)) return there;
    if (made.device().type() != c10::kCPU || !device) return made;
    for (auto& [there, here] : views)
      if (here.storage().unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl())
        return on(there.storage(), made, kKey);
    return on(adopted(made.storage(), *device), made, kKey);
  }
  // Outputs may have been given another size, and other memory with it.
  void follow() {
    for (auto& [there, here] : views) {
      if (here.storage().data() != there.storage().data()) {
        auto bytes = renamed(here.storage(), *device, &device_allocator);
        there.storage().unsafeGetStorageImpl()->set_nbytes(here.storage().nbytes());
        auto* kept = new c10::Storage(here.storage());
        there.storage().set_data_ptr_noswap({kept->mutable_data(), kept, &release, *device});
      }
      if (here.sizes() != there.sizes() || here.strides() != there.strides())
        there.unsafeGetTensorImpl()->set_sizes_and_strides(
            here.sizes(), here.strides(), here.storage_offset());
    }
  }
  std::optional<c10::Device> host;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op};
  const auto& schema = op.schema();
  const auto num = schema.arguments().size();
  const auto first = stack->size() - num;
  auto each = [&](auto&& tensor, auto&& list, auto&& optional) {
    for (size_t n = 0; n < num; ++n) {
      auto& value = (*stack)[first + n];
      if (value.isTensor()) tensor(value);
      else if (value.isTensorList()) list(value);
      else if (value.isOptionalTensorList()) optional(value);
    }
  };
  each(
      [&](c10::IValue& value) { call.find(value.toTensor()); },
      [&](c10::IValue& value) { for (const at::Tensor& t : value.toTensorVector()) call.find(t); },
      [&](c10::IValue& value) {
        for (const auto& t : value.toOptionalTensorVector()) if (t) call.find(*t);
      });
  for (size_t n = 0; n < num; ++n) {
    auto& value = (*stack)[first + n];
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      auto wanted = value.toDevice();
      if (!call.device) call.device = {kDevice, wanted.has_index() ? wanted.index() : current};
      value = c10::Device(c10::kCPU);
    }
  }
  call.check();
  settle();
  if (waiting.count(schema.name())) wait(schema.name());
  if (indexing.count(schema.name()))
    for (const auto& t : (*stack)[first + 1].toOptionalTensorVector())
      if (t && t->defined() && !t->is_privateuseone()) wait(schema.name());
  for (size_t n = 0; n < num; ++n) {
    auto& value = (*stack)[first + n];
    const auto& type = *schema.arguments()[n].type();
    bool may_draw = type.str().find("Generator") != std::string::npos;
    if (!may_draw) continue;
    auto given = value.isGenerator() ? value.toGenerator()
                                     : default_generator(call.device ? call.device->index() : current);
    TORCH_CHECK(
        given.device().type() == kDevice, "Expected a '", c10::Device(kDevice),
        "' device type for generator but found '", given.device(), "'");
    auto* own = given.get<DeviceGenerator>();
    own->offset += 4;
    value = own->inner;
  }
  each(
      [&](c10::IValue& value) { value = call.view(value.toTensor()); },
      [&](c10::IValue& value) {
        c10::List<at::Tensor> there;
        for (const at::Tensor& t : value.toTensorVector()) there.push_back(call.view(t));
        value = there;
      },
      [&](c10::IValue& value) {
        c10::List<std::optional<at::Tensor>> there;
        for (const auto& t : value.toOptionalTensorVector())
          there.push_back(t ? std::optional<at::Tensor>(call.view(*t)) : t);
        value = there;
      });
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.follow();
  const auto begin_of_results = stack->size() - schema.returns().size();
  for (size_t n = begin_of_results; n < stack->size(); ++n) {
    auto& value = (*stack)[n];
    if (value.isTensor()) {
      value = call.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> back;
      for (const at::Tensor& t : value.toTensorVector()) back.push_back(call.back(t));
      value = back;
    }
  }
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return on(renamed(tensor.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU)), tensor, c10::DispatchKey::CPU);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool is_async) {
  begin();
  const auto& host = from.is_privateuseone() ? to : from;
  if (host.is_cpu() && from.numel() > 0) {
    bool is_pageable = !at::detail::getPrivateUse1Hooks().isPinnedPtr(host.storage().data());
    if (!is_async || (is_pageable && to.is_cpu())) wait(to.is_cpu() ? "to host" : "to device");
  }
  settle();
  if (from.is_privateuseone()) note_use(from.storage().data());
  host_view(to).copy_(host_view(from));
  if (!from.is_privateuseone()) note_copy(to.storage().data());
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = copied.find(self.storage().data());
  if (found != copied.end()) found->second.recorded.insert(stream.id());
}

at::Scalar item(const at::Tensor& tensor) {
  wait("item");
  settle();
  return host_view(tensor).item();
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage storage) {
  c10::SymInt number = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  c10::SymInt one = 1;
  return set_storage(self, std::move(storage), 0, {&number, 1}, {&one, 1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.sym_storage_offset(), from.sym_sizes(), from.sym_strides());
}

// Attention is computed step by step: the fused kernels of the CPU are not asked for.
int64_t attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0;
}

// As on the CPU: torch has another for accelerators, whose kernel of the CPU takes the CPU's generator.
at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  if (!train || p == 0 || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::empty_like(input).zero_());
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", &dropout);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_fused_sdp_choice", &attention);
  m.impl("dropout", &dropout);
  // They choose among kernels by device.
  for (const char* name : {"convolution", "convolution_backward", "_convolution"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// Mixed precision: what the CPU's autocast computes in a lower one; with it, the rest in float32.
const std::set<std::string> lower = {
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::bmm", "aten::mm", "aten::baddbmm",
    "aten::addmm", "aten::addbmm", "aten::linear", "aten::matmul", "aten::conv_transpose1d",
    "aten::conv_transpose2d", "aten::conv_transpose3d", "aten::scaled_dot_product_attention"};
const std::set<std::string> widest = {"aten::stack", "aten::cat", "aten::index_copy"};

void in_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto& name = op.schema().name();
  auto type = lower.count(name) ? at::autocast::get_autocast_dtype(kDevice) : at::kFloat;
  auto is_meant = [](const at::Tensor& t) {
    return t.defined() && t.is_privateuseone() && t.is_floating_point() && t.scalar_type() != at::kDouble;
  };
  const auto first = stack->size() - op.schema().arguments().size();
  if (widest.count(name)) {
    std::set<at::ScalarType> types;
    for (size_t n = first; n < stack->size(); ++n)
      if ((*stack)[n].isTensorList())
        for (const at::Tensor& t : (*stack)[n].toTensorVector()) types.insert(t.scalar_type());
    if (types.size() < 2) return op.callBoxed(stack);
  }
  for (size_t n = first; n < stack->size(); ++n) {
    auto& value = (*stack)[n];
    if (value.isTensor() && is_meant(value.toTensor())) {
      value = at::autocast::cached_cast(type, value.toTensor(), kDevice);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> cast;
      for (const at::Tensor& t : value.toTensorVector())
        cast.push_back(is_meant(t) ? at::autocast::cached_cast(type, t, kDevice) : t);
      value = cast;
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// For backends that move tensors: they do not wait for the stream, and know when to.
TORCH_LIBRARY(hostgpu, m) {
  m.def("host_view(Tensor(a) tensor) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(hostgpu, PrivateUse1, m) {
  m.impl("host_view", &host_view);
}

// Copies conjugate and negate by themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// What has a kernel of the CPU beside one for any device is computed by that of the CPU.
void register_rest() {
  static torch::Library library(
      torch::Library::IMPL, "aten", std::make_optional(kKey), __FILE__, __LINE__);
  static torch::Library autocast(
      torch::Library::IMPL, "aten", std::make_optional(c10::DispatchKey::AutocastPrivateUse1),
      __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU))
      autocast.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&in_precision>());
    if (op->hasKernelForDispatchKey(kKey)) continue;
    bool is_composite =
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (is_composite && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  register_rest();
  m.def("waits", [] {
    pybind11::dict found;
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [why, number] : counted) found[why.c_str()] = number;
    return found;
  });
  m.def("reset", [] {
    std::lock_guard<std::mutex> lock(mutex);
    counted.clear();
  });
  m.def("listen", [](pybind11::object heard) {
    listener = heard.is_none() ? nullptr : heard.release().ptr();
  });
  m.def("hold", [] {
    std::lock_guard<std::mutex> lock(mutex);
    ++under_way;
  });
  m.def("release", [] {
    std::lock_guard<std::mutex> lock(mutex);
    if (--under_way == 0) settled.notify_all();
  });
  m.def("default_generator", [](int index) {
    auto* made = THPGenerator_initDefaultGenerator(default_generator(index));
    return pybind11::reinterpret_steal<pybind11::object>(made);
  });
  m.def("device_count", [] { return static_cast<int>(kCount); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice({kDevice, static_cast<c10::DeviceIndex>(index)}); });
  m.def("is_in_bad_fork", [] { return is_bad_fork; });
  m.def("is_initialized", [] { return has_begun && !is_bad_fork; });
}
