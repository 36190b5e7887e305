//! A compiled template in which Python's operators replace the engine's.
//!
//! The engine parses and runs templates. Operators, methods and output must have Python's semantics, so each of these
//! instructions is replaced by a call of a filter with the operator's name.

use super::catch_panic::catch_panic;
use super::python::{METHODS, check_nested, failed};
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Filters are looked up by name at each call.
const NO_CACHE: u8 = u8::MAX;

/// The flag of recursive loops.
const RECURSIVE: u8 = 2;

/// A compiled template.
pub(super) struct Program<'source> {
    instructions: Instructions<'source>,
}

impl<'source> Program<'source> {
    pub(super) fn new(source: &'source str, syntax: &SyntaxConfig) -> Result<Self, Error> {
        let config = TemplateConfig {
            syntax_config: syntax.clone(),
            default_auto_escape: Arc::new(|_| AutoEscape::None),
        };
        let compiled = catch_panic(|| CompiledTemplate::new("chat template", source, &config));
        let compiled = compiled.unwrap_or_else(|panic| Err(failed(panic)))?;
        Ok(Self { instructions: rewritten(&compiled.instructions)? })
    }

    /// Returns the text.
    pub(super) fn run<'env>(
        &'env self,
        environment: &'env Environment<'env>,
        root: Value,
    ) -> Result<String, Error>
    where
        'source: 'env,
    {
        let blocks = BTreeMap::new();
        let run = || {
            let mut text = String::new();
            let mut output = make_string_output(&mut text);
            eval(environment, &self.instructions, root, &blocks, &mut output, AutoEscape::None)?;
            Ok(text)
        };
        catch_panic(run).unwrap_or_else(|panic| Err(failed(panic)))
    }
}

fn rewritten<'source>(compiled: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let instructions: Vec<_> = (0..).map_while(|index| compiled.get(index)).collect();
    let mut replaced = Vec::with_capacity(instructions.len());
    // The new index of each instruction, followed by the number of new instructions.
    let mut places = vec![0];
    let mut is_default = false;
    for (index, instruction) in (0..).zip(instructions) {
        let line = compiled.get_line(index).unwrap_or(0);
        // The engine evaluates parameter defaults from last to first, Python from first to last.
        is_default = match instruction {
            Instruction::IsUndefined => true,
            Instruction::StoreLocal(_) => false,
            Instruction::Lookup(_) if is_default => {
                return Err(failed(format!(
                    "line {line}: a macro's default that names a variable is not supported"
                )));
            }
            _ => is_default,
        };
        let new = replacement(instruction).map_err(|problem| failed(format!("line {line}: {problem}")))?;
        places.push(places[index as usize] + new.len() as u32);
        replaced.push((new, u16::try_from(line).unwrap_or(u16::MAX)));
    }
    let mut program = Instructions::new(compiled.name(), compiled.source());
    for (new, line) in replaced {
        for mut instruction in new {
            use Instruction as I;
            if let I::Jump(target)
            | I::Iterate(target)
            | I::JumpIfFalse(target)
            | I::JumpIfFalseOrPop(target)
            | I::JumpIfTrueOrPop(target)
            | I::BuildMacro(_, target, _) = &mut instruction
            {
                *target = places[*target as usize];
            }
            program.add_with_line(instruction, line);
        }
    }
    Ok(program)
}

/// Returns the replacement of an instruction, or an error if it is not supported.
fn replacement<'source>(
    instruction: &Instruction<'source>,
) -> Result<Vec<Instruction<'source>>, &'static str> {
    use Instruction as I;
    let filter = |name, num_arguments| I::ApplyFilter(name, Some(num_arguments), NO_CACHE);
    let binary = |name| Ok(vec![filter(name, 2)]);
    match instruction {
        // The formatter counts its output.
        I::EmitRaw(text) => Ok(vec![I::LoadConst(Value::from(*text)), I::Emit]),
        I::Add => binary("+"),
        I::Sub => binary("-"),
        I::Mul => binary("*"),
        I::Div => binary("/"),
        I::IntDiv => binary("//"),
        I::Rem => binary("%"),
        I::Pow => binary("**"),
        I::Neg => Ok(vec![filter("-x", 1)]),
        I::Eq => binary("=="),
        I::Ne => binary("!="),
        I::Gt => binary(">"),
        I::Gte => binary(">="),
        I::Lt => binary("<"),
        I::Lte => binary("<="),
        I::In => binary("in"),
        I::StringConcat => binary("~"),
        I::GetItem => binary("[]"),
        I::Slice => Ok(vec![filter("[:]", 4)]),
        I::CompareAndPreserve(operator) => Ok(vec![
            I::BuildTuple(Some(2)),
            I::DupTop,
            filter(chained(&format!("{operator:?}")), 1),
            I::Swap,
            filter("chained-second", 1),
            I::Swap,
        ]),
        I::GetAttr(name) => Ok(match METHODS.iter().find(|method| method.name == *name) {
            Some(method) => vec![filter(method.attribute, 1)],
            None => vec![I::LoadConst(Value::from(*name)), filter("[]", 2)],
        }),
        I::CallMethod(name, num_arguments) => Ok(match METHODS.iter().find(|method| method.name == *name) {
            Some(method) => vec![I::ApplyFilter(method.call, *num_arguments, NO_CACHE)],
            None => vec![instruction.clone()],
        }),
        I::ApplyFilter(name, num_arguments, _) => Ok(vec![I::ApplyFilter(name, *num_arguments, NO_CACHE)]),
        I::PerformTest(name, num_arguments, _) => Ok(vec![I::PerformTest(name, *num_arguments, NO_CACHE)]),
        I::BuildList(_) | I::BuildTuple(_) | I::BuildMap(_) => {
            Ok(vec![instruction.clone(), filter("nest", 1)])
        }
        I::SetAttr(_) => Ok(vec![I::Swap, filter("nest", 1), I::Swap, instruction.clone()]),
        I::PushLoop(flags) if flags & RECURSIVE != 0 => Err("recursive loops are not supported"),
        I::PushLoop(_) => Ok(vec![filter("for", 1), instruction.clone()]),
        I::Lookup("self" | "lipsum") => Err("`self` and `lipsum` are not supported"),
        I::Lookup("varargs" | "kwargs") => Err("`varargs` and `kwargs` are not supported"),
        I::CallBlock(_) | I::LoadBlocks | I::FastSuper | I::Include(_) | I::ExportLocals => {
            Err("blocks and other templates are not supported")
        }
        I::LoadConst(value) if check_nested(value, 0).is_err() => Err("a constant is not supported"),
        I::PushAutoEscape => Err("`autoescape` is not supported"),
        other => Ok(vec![other.clone()]),
    }
}

/// Matches the comparison by name, because the engine does not export its type.
fn chained(operator: &str) -> &'static str {
    match operator {
        "Eq" => "chained-==",
        "Ne" => "chained-!=",
        "Lt" => "chained-<",
        "Lte" => "chained-<=",
        "Gt" => "chained->",
        "Gte" => "chained->=",
        "In" => "chained-in",
        "NotIn" => "chained-not-in",
        _ => "chained-unknown",
    }
}
