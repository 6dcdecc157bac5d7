// Package launch starts a program that serves, and makes sure that nothing of it is left when it is to end.
//
// Between this process and the program stands a guard: this same executable, started in another mode (GuardIfAsked). It
// is the program's parent, and on Linux the one to whom orphans among its descendants fall (a "subreaper"), so that
// also those that left the program's process group or session stay below it. It holds one end of a pipe whose other end
// only this process has: when this process dies, in whatever way, the guard sees the end of the pipe, and ends all of
// them. When the guard dies, the kernel kills the program (PDEATHSIG), and its descendants fall to this process, which
// then does what the guard would have done.
//
//	this process ── control pipe ──> guard ──> program ──> ...
//	             <── status pipe ───
//
// The guard has a session of its own: signals for this process's group, a terminal's Ctrl-C and the kill of a launcher
// before us go to this process alone. Nothing below the guard can join a group outside of it.
//
// # Processes are named safely
//
// A process id may be another process's by the time that it is used. An own child that was not waited for keeps its id, and
// so does its process group: those are signalled as they are. All below go through a pidfd that was compared with /proc after
// it was opened; what was missed there becomes an own child when its parent dies. The program itself is waited for last, so
// that its group's id stays its own.
//
// # Other systems
//
// Elsewhere than on Linux there are no subreapers and no PDEATHSIG: what left the program's process group is not found,
// and the guard's own death leaves the program behind. Where there are no process groups at all, Start fails.
package launch
