/* The trap of some cloud machines, rebuilt: a processor that claims AMX, and dies of its instructions.
 *
 * Preloaded into a Python process. CPUID says AMX whatever the processor says (the kernel lets CPUID fault, and the
 * handler here answers it), and the kernel's permission for AMX seems granted to everybody but MKL, although nobody asked for
 * it. oneDNN then runs AMX's instructions, and the processor or the kernel answers with SIGILL. MKL is left alone, since
 * on those machines it survives. Where CPUID cannot fault, a processor with AMX is needed.
 *
 * With TRAP_MKL set MKL falls into the trap as well.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { SET_CPUID = 0x1012, GET_SUPPORTED = 0x1021, GET_PERMITTED = 0x1022, REQUEST = 0x1023 };

static int is_python, answers_cpuid;

static long kernel(long number, long a, long b) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b) : "rcx", "r11", "memory");
    return result;
}

static void answer_cpuid(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    if (instruction[0] != 0x0f || instruction[1] != 0xa2) { /* somebody's own fault: die of it */
        answers_cpuid = 0;
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    kernel(SYS_arch_prctl, SET_CPUID, 1);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
    kernel(SYS_arch_prctl, SET_CPUID, 0);
    if (leaf == 7 && part == 0)
        d |= 1u << 22 | 1u << 24 | 1u << 25; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void set(void) {
    if (strncmp(program_invocation_short_name, "python", 6)) /* compilers have handlers of their own */
        return;
    is_python = 1;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer_cpuid;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, NULL);
    answers_cpuid = kernel(SYS_arch_prctl, SET_CPUID, 0) == 0;
}

/* The handler above stays, whoever else wants the signal. */
int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sigaction");
    if (!answers_cpuid || number != SIGSEGV)
        return real(number, action, old);
    if (old)
        memset(old, 0, sizeof *old);
    return 0;
}

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long), d = va_arg(list, long),
         e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    if (is_python && number == SYS_arch_prctl && a >= GET_SUPPORTED && a <= REQUEST) {
        Dl_info caller;
        memset(&caller, 0, sizeof caller);
        dladdr(__builtin_return_address(0), &caller);
        if (getenv("TRAP_MKL") || !caller.dli_sname || strncmp(caller.dli_sname, "mkl_serv", 8)) {
            if (a != REQUEST)
                *(unsigned long *)b = 0x600ff;
            return 0;
        }
    }
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = -result;
        return -1;
    }
    return result;
}
