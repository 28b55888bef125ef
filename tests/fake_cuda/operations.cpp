// Beside device.cpp: real tensors on its device, for what the host alone takes. Memory is addresses without anything
// behind them, operations write nothing, and a read of the device is zero. Results are shaped by torch's own meta
// functions; what a step calls for each tensor has a kernel here, which takes as long as torch's own does to begin.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <atomic>

namespace {

using namespace at;

constexpr DispatchKeySet KEYS(DispatchKey::CUDA);

struct Addresses final : public c10::Allocator {
  std::atomic<uint64_t> next{0x7F0000000000ull};

  DataPtr allocate(size_t bytes) override {
    void* made = bytes ? reinterpret_cast<void*>(next.fetch_add((bytes + 511) / 512 * 512)) : nullptr;
    return {made, made, [](void*) {}, Device(DeviceType::CUDA, 0)};
  }
  void copy_data(void*, const void*, size_t) const override {}
} addresses;

struct Plugged {
  Plugged() { c10::SetAllocator(DeviceType::CUDA, &addresses); }
} plugged;

Tensor fake_empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &addresses, KEYS, dtype_or_default(dtype), format);
}

Tensor fake_empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &addresses, KEYS, dtype_or_default(dtype));
}

Tensor fake_as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor fake_view(const Tensor& self, IntArrayRef size) {
  std::vector<int64_t> inferred = at::infer_size(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "this view needs a copy");
  return at::native::as_strided_tensorimpl(self, inferred, *stride, self.storage_offset());
}

Tensor& fake_copy(Tensor& self, const Tensor&, bool) {
  if (self.device().is_cpu()) memset(self.data_ptr(), 0, self.nbytes());
  return self;
}

Scalar fake_value(const Tensor& self) {
  if (self.scalar_type() == kBool) return Scalar(false);
  return at::isIntegralType(self.scalar_type(), true) ? Scalar(0) : Scalar(0.0);
}

std::vector<Tensor> fake_norms(TensorList of, const Scalar&, std::optional<ScalarType> dtype) {
  std::vector<Tensor> made;
  made.reserve(of.size());
  for (const auto& each : of) made.push_back(fake_empty({}, dtype.value_or(each.scalar_type()), {}, {}, {}, {}));
  return made;
}

Tensor fake_stack(TensorList of, int64_t dim) {
  auto size = of[0].sizes().vec();
  size.insert(size.begin() + at::maybe_wrap_dim(dim, size.size() + 1), of.size());
  return fake_empty(size, of[0].scalar_type(), {}, {}, {}, {});
}

Tensor fake_cat(const ITensorListRef& of, int64_t dim) {
  std::vector<int64_t> size;
  ScalarType dtype{};
  for (const Tensor& each : of) {
    if (size.empty()) {
      size = each.sizes().vec();
      dtype = each.scalar_type();
    } else {
      size[dim] += each.size(dim);
    }
  }
  return fake_empty(size, dtype, {}, {}, {}, {});
}

Tensor on_meta(const Tensor& self) {
  if (!self.device().is_cuda()) return self;
  return at::empty_strided(self.sizes(), self.strides(), self.options().device(kMeta));
}

Tensor on_device(const Tensor& self) {
  if (!self.device().is_meta()) return self;
  return fake_empty_strided(self.sizes(), self.strides(), self.scalar_type(), {}, {}, {});
}

IValue moved(const IValue& value, Tensor (*to)(const Tensor&)) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(to(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(to(each));
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return Device(kMeta);
  return value;
}

// Any other operation: one in place gives back what it was given, the rest what the meta function makes.
void nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->end() - arguments.size();
  torch::jit::Stack made;
  if (op.schema().is_mutable()) {
    for (const auto& result : op.schema().returns()) {
      for (size_t i = 0; i < arguments.size(); ++i) {
        auto* alias = arguments[i].alias_info();
        if (alias && result.alias_info() && alias->beforeSets() == result.alias_info()->beforeSets()) {
          made.push_back(*(first + i));
          break;
        }
      }
    }
    stack->erase(first, stack->end());
  } else {
    torch::jit::Stack inner;
    for (size_t i = 0; i < arguments.size(); ++i) inner.push_back(moved(*(first + i), on_meta));
    stack->erase(first, stack->end());
    op.callBoxed(inner);
    for (auto& each : inner) made.push_back(moved(each, on_device));
  }
  for (auto& each : made) stack->push_back(std::move(each));
}

bool is_plain(const std::string& name) {  // what torch composes of other operations, where a device has no kernel
  for (const char* start : {"aten::_foreach", "aten::_fused_"}) {
    if (name.rfind(start, 0) == 0) return true;
  }
  for (const char* one : {"isfinite", "zeros_like", "ones_like", "clone", "fill_", "zero_"}) {
    if (name == std::string("aten::") + one) return true;
  }
  return false;
}

}  // namespace

// torch resizes a storage itself, and only one of a device that it was built for.
extern "C" void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  storage->set_data_ptr_noswap(addresses.allocate(bytes));
  storage->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&nothing>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(fake_empty));
  m.impl("empty_strided", TORCH_FN(fake_empty_strided));
  m.impl("as_strided", TORCH_FN(fake_as_strided));
  m.impl("view", TORCH_FN(fake_view));
  m.impl("copy_", TORCH_FN(fake_copy));
  m.impl("_local_scalar_dense", TORCH_FN(fake_value));
  m.impl("_foreach_norm.Scalar", TORCH_FN(fake_norms));
  m.impl("stack", TORCH_FN(fake_stack));
  m.impl("cat", TORCH_FN(fake_cat));
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    auto full = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    if (is_plain(op.name) && full.find("out") == std::string::npos && full != "aten::_foreach_norm.Scalar") {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&nothing>());
    }
  }
}
